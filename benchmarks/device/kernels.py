"""Times an encode and a decode step on CUDA at every bucket: plain regions, Inductor's kernels, and fused ones.

    python -m snapcap.benchmarks.device.kernels [--model vit-b16-gpt2] [--variants eager,inductor,fused]
        [--buckets 1,4,16,64]

Each is one CUDA graph over the runner that serves, replayed back to back, the fastest of five series. Beside each
time stand the least bytes that a decode step reads (weights and cross-attention K/V), or the operations of an
encode's products, and what that makes of the card per second.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from snapcap.benchmarks.harness.arguments import add_files, make_parser, require_cuda
from snapcap.benchmarks.harness.common import scratch
from snapcap.benchmarks.harness.random_checkpoint import RANDOM_MODELS
from snapcap.benchmarks.harness.workload import open_model, open_workload, start_options
from snapcap.benchmarks.report.tables import Report, number
from snapcap.warmup.option import parse_buckets
from snapcap.warmup.progress.status import COMPONENTS

if TYPE_CHECKING:
    from snapcap.models.regions.functions import RegionFunction
    from snapcap.models.regions.table import Region
    from snapcap.warmup.plan.buckets import Bucket
    from snapcap.warmup.runtime.devices.device import Timer
    from snapcap.warmup.runtime.loaded_model import LoadedModel
    from snapcap.warmup.runtime.runner import Runner

REPLAYS, SERIES = 20, 5


@dataclass(frozen=True)
class Compiled:
    """A backend that hands out each region as ``torch.compile`` makes it, plain or fused."""

    model: "LoadedModel"
    fused: bool

    @property
    def name(self) -> str:
        return "fused" if self.fused else "inductor"

    def callable(self, region: "Region", bucket: "Bucket") -> "RegionFunction":
        from snapcap.models.regions.fused.compiled import compiled_function

        device, dtype = self.model.device, self.model.dtype
        function = compiled_function(region, device, dtype) if self.fused else region.function
        compiled: RegionFunction = torch.compile(function, fullgraph=True, dynamic=False)
        return compiled


def milliseconds(replay: Callable[[], object], timer: "Callable[[], Timer]") -> float:
    """Of one replay, on the device: the fastest of some series, back to back."""

    def series() -> float:
        timing = timer()
        for _ in range(REPLAYS):
            replay()
        return timing.stop().seconds() * 1000 / REPLAYS

    return min(series() for _ in range(SERIES))


def measure(runner: "Runner[Any]", bucket: "Bucket") -> tuple[float, float]:
    """Milliseconds of an encode and of a decode step at a bucket whose callables are bound."""
    import numpy as np

    from snapcap.warmup.runtime.slot_request import SlotRequest

    height, width = runner.config.vision.image_size
    images = [np.zeros((height, width, 3), dtype=np.uint8)] * bucket.size
    runner.encode(bucket, images, 0)
    runner.admit(0, [SlotRequest()] * bucket.size)
    runner.decode_step(bucket)
    runner.capture("encoder", bucket)
    runner.capture("decoder", bucket)
    encode, step = (milliseconds(runner.replay(part, bucket), runner.timer) for part in COMPONENTS)
    return encode, step


def limits(model: "LoadedModel", rows: int) -> tuple[float, float]:
    """TFLOP of an encode's products; GB that a decode step reads at least."""
    vision, decoder = model.config.vision, model.config.decoder
    tokens = vision.sequence_length
    products = 0
    for region in model.regions.encoder:
        own = sum(w.numel() for w in model.weights.of(region)[0] if w.dim() == 2)
        attention = 2 * tokens * region.hidden[1] if region.name.endswith("_block") else 0
        products += region.layers * (own + attention)
    flop = 2 * rows * tokens * products
    read = sum(w.nbytes for layer in model.weights.of(model.regions["decoder_block"]) for w in layer)
    read += max(w.nbytes for w in model.weights.of(model.regions["decoder_after"])[0])
    size = torch.finfo(model.dtype).bits // 8
    read += rows * decoder.num_layers * 2 * tokens * decoder.num_heads * decoder.head_dim * size
    return flop / 1e12, read / 1e9


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=tuple(RANDOM_MODELS), default="vit-b16-gpt2")
    parser.add_argument("--variants", default="eager,inductor,fused")
    parser.add_argument("--buckets", type=parse_buckets, default="1,4,16,64")
    add_files(parser)
    options = parser.parse_args()
    require_cuda("device.kernels", "on a CPU snapcap.benchmarks.device.steps compares the backends")
    torch._dynamo.config.recompile_limit = 64  # one code object for all buckets
    report, raw = Report(), {}
    with scratch(options.cache) as folder:
        for variant in options.variants.split(","):
            raw[variant] = _variant(variant, options, folder)
    for index, (title, unit) in enumerate((("An encode", "TFLOP/s"), ("A decode step", "TB/s"))):
        rows = []
        for variant, buckets in raw.items():
            for size, found in buckets.items():
                time_ms, amount = found["ms"][index], found["limits"][index]
                rate = amount / time_ms * (1000 if index == 0 else 1)
                rows.append([f"{variant}, bucket {size}", number(time_ms, 3), number(amount, 3), number(rate)])
        report.add(title, ("", "ms", "TFLOP" if index == 0 else "GB", unit), rows)
    report.write(options.json, raw)


def _variant(variant: str, options: argparse.Namespace, folder: Path) -> dict[int, dict[str, Any]]:
    from snapcap.warmup.runtime.backends.eager import EagerBackend
    from snapcap.warmup.runtime.devices.torch_settings import torch_device
    from snapcap.warmup.runtime.runner import Runner, open_callables

    checkpoint = open_workload(options.model, folder).folder
    _, plan, model = open_model(start_options(checkpoint, folder, buckets=options.buckets))
    backend = EagerBackend() if variant == "eager" else Compiled(model, variant == "fused")
    runner = Runner(model, torch_device(model.device))
    found = {}
    for bucket in reversed(plan.table.buckets):
        runner.bind("encoder", bucket, open_callables(runner.regions, "encoder", bucket, backend))
        runner.bind("decoder", bucket, open_callables(runner.regions, "decoder", bucket, backend))
        found[bucket.size] = {"ms": measure(runner, bucket), "limits": limits(model, bucket.size)}
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main()
