"""Measures transformers' `generate` without a server, in a process of its own, for comparison with the engine.

    python -m snapcap.benchmarks.peers.generate --model FOLDER --images FOLDER [--batches 1,64] [--compile]

Prints one result line: for each batch size the captions/s and the percentiles of a whole batch. Images are decoded
before.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.marks import mark, memory, result
from snapcap.benchmarks.harness.measurements import percentiles_ms
from snapcap.benchmarks.harness.workload import read_images
from snapcap.benchmarks.peers.transformers_model import Captioner

WARM_UPS = 2


def measure(run: Callable[[], object], batch: int, seconds: float) -> dict[str, float]:
    """Returns captions/s and latencies of batches, one after the other. ``run`` captions one batch."""
    for _ in range(WARM_UPS):
        run()
    latencies: list[float] = []
    while sum(latencies) < seconds:
        began = time.perf_counter()
        run()
        latencies.append(time.perf_counter() - began)
    rate = batch * len(latencies) / sum(latencies)
    return {"captions_per_s": rate, "n": len(latencies), **percentiles_ms(latencies)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--images", type=Path, required=True, help="folder with images and captions.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batches", default="1", help="batch sizes, such as 1,16,64")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each batch size")
    parser.add_argument("--compile", action="store_true", help="torch.compile over encoder and decoder")
    options = parser.parse_args()
    captioner = Captioner(options.model, options.device, options.compile)
    mark("ready")
    samples = read_images(options.images)
    images = [data for data, _ in samples]
    for data, caption in samples[:3]:
        text = captioner.generate(captioner.pixels([data]))[0]["caption"]
        if caption is not None and text != caption:
            raise RuntimeError(f"a wrong caption: {text!r}, expected {caption!r}")
    rates = {}
    for batch in map(int, options.batches.split(",")):
        pixels = captioner.pixels((images * batch)[:batch])
        rates[str(batch)] = measure(partial(captioner.generate, pixels), batch, options.seconds)
    result({"concurrency": rates, **memory()})


if __name__ == "__main__":
    main()
