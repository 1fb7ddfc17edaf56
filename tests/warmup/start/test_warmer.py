"""What a start runs before it is ready: every package, and with one bucket every layer."""

from collections import Counter
from typing import Any

import pytest
import torch

from snapcap.models.regions.table import Region, RegionCall
from snapcap.warmup.plan.plan import Bucket, BucketTable
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.torch_model import LoadedModel, torch_device
from snapcap.warmup.start.warmer import Warmer, self_test

SIZES = (1, 4)


class Counting:
    """The regions' own functions, which count their calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: Counter[tuple[str, int]] = Counter()

    def callable(self, region: Region, bucket: Bucket) -> RegionCall:
        def call(*inputs: Any) -> Any:
            self.calls[region.name, bucket.size] += 1
            return region.function(*inputs)

        return call


@pytest.mark.parametrize("backend", ["aot", "jit", "eager"])
def test_every_region_of_every_bucket_runs_and_jit_with_all_layers(backend: str, demo_model: LoadedModel) -> None:
    counting = Counting(backend)
    runner = Runner(demo_model, torch_device(torch.device("cpu")))
    status, table = StartupStatus(), BucketTable.of(SIZES)
    status.expect(SIZES, "cpu", "float32")
    warmer = Warmer(runner, table, status, Timeline(0.0), eager=counting)
    warmer.assign(counting, table.buckets)
    with torch.no_grad():
        warmer.warm(table.buckets)
    regions = demo_model.regions
    for size in SIZES:
        for region in (*regions.encoder, *regions.decoder):
            expected = 1 if backend == "aot" else region.layers
            assert counting.calls[region.name, size] == expected, (region.name, size)
    before = counting.calls.copy()
    with torch.no_grad():
        tokens = self_test(runner, table.buckets[0])
    encoded = counting.calls - before
    assert all(encoded[region.name, 1] == region.layers for region in regions.encoder)
    assert encoded["decoder_after", 1] == len(tokens)
