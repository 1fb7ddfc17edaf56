"""What a start runs before it is ready: every package, and with one bucket every layer."""

from collections import Counter
from typing import Any

import pytest
import torch

from snapcap.models.regions.table import Region, RegionCall
from snapcap.warmup.plan.plan import Bucket, BucketTable
from snapcap.warmup.progress.status import COMPONENTS, StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.torch_model import LoadedModel, torch_device
from snapcap.warmup.start import warmer
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
    made = Warmer(runner, table, status, Timeline(0.0), eager=counting)
    made.assign(counting, table.buckets)
    with torch.no_grad():
        made.warm(table.buckets, counting)
    regions = demo_model.regions
    for size in SIZES:
        for region in (*regions.encoder, *regions.decoder):
            expected = 1 if backend == "aot" else region.layers
            assert counting.calls[region.name, size] == expected, (region.name, size)
    before = counting.calls.copy()
    with torch.no_grad():
        tokens, _ = self_test(runner, table.buckets[0])
    encoded = counting.calls - before
    assert all(encoded[region.name, 1] == region.layers for region in regions.encoder)
    assert encoded["decoder_after", 1] == len(tokens)


def test_jit_compiles_a_bucket_without_encodes_for_the_decoder_alone(demo_model: LoadedModel) -> None:
    counting, status, (one, four) = Counting("jit"), StartupStatus(), BucketTable.of(SIZES).buckets
    runner = Runner(demo_model, torch_device(torch.device("cpu")))
    status.expect((1,), "cpu", "float32", (4,))
    made = Warmer(runner, BucketTable.of((1,)), status, Timeline(0.0), eager=counting)
    made.assign(counting, (one,))
    with torch.no_grad():
        made.warm((one, four), counting)
    regions = demo_model.regions
    assert [counting.calls[each.name, 4] for each in regions.decoder] == [each.layers for each in regions.decoder]
    assert not any(counting.calls[region.name, 4] for region in regions.encoder)
    found = [(bucket.component, bucket.size, bucket.state, bucket.backend) for bucket in status.buckets()]
    assert found == [(name, size, "warm", "jit") for name, size in (("encoder", 1), ("decoder", 1), ("decoder", 4))]


def test_a_tested_models_larger_buckets_are_recorded_without_a_run_where_launches_are_recorded(
    demo_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting, status = Counting("aot"), StartupStatus()
    device = torch_device(torch.device("cpu"))
    monkeypatch.setattr(type(device), "runs_ahead", True)
    recorded: list[object] = []
    monkeypatch.setattr(type(device), "record", lambda _, run: recorded.append(run), raising=False)
    runner = Runner(demo_model, device)
    status.expect((1, 4), "cpu", "float32", (8,))
    made = Warmer(runner, BucketTable.of((1, 4)), status, Timeline(0.0), tested=True)
    first, second, steps = BucketTable.of((1, 4, 8)).buckets
    with torch.no_grad():
        made.warm((first, second), counting)
        assert {size for _, size in counting.calls} == {1}
        made.warm_aside(steps, counting)
    assert {size for _, size in counting.calls} == {1}
    assert len(recorded) == 5
    assert {bucket.state for bucket in status.buckets()} == {"captured"}


@pytest.mark.parametrize("backend", ["aot", "jit", "eager"])
def test_on_a_cpu_long_runs_are_left_to_requests_unless_they_compile(
    backend: str, demo_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmer, "LONGEST_RUN_S", 0.0)
    counting, status, table = Counting(backend), StartupStatus(), BucketTable.of(SIZES)
    runner = Runner(demo_model, torch_device(torch.device("cpu")))
    status.expect(SIZES, "cpu", "float32")
    with torch.no_grad():
        Warmer(runner, table, status, Timeline(0.0), eager=counting).warm(table.buckets, counting)
    first, *others = SIZES
    left = {"aot": "loaded", "eager": "eager", "jit": "warm"}[backend]
    assert {size for _, size in counting.calls} == ({*SIZES} if backend == "jit" else {first})
    assert {bucket.state for bucket in status.buckets() if bucket.size in others} == {left}
    assert all(runner.is_bound(component, bucket) for component in COMPONENTS for bucket in table.buckets)
