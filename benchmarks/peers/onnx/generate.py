"""Measures the ONNX Runtime captioner without a server, in a process of its own, for comparison with the engine.

    python -m snapcap.benchmarks.peers.onnx.generate --model FOLDER --images FOLDER [--batches 1,4]

Prints one result line: for each batch size the captions/s and the percentiles of a whole batch, and for some
numbers of rows the milliseconds of an encode and of a decode step. Images are decoded before.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from snapcap.benchmarks.harness.arguments import count, counts, make_parser
from snapcap.benchmarks.harness.marks import mark, memory, result
from snapcap.benchmarks.harness.workload import read_images
from snapcap.benchmarks.peers.generate import measure
from snapcap.benchmarks.peers.onnx.captioner import Captioner, Pixels

STEPS = 20


def measure_steps(captioner: Captioner, pixels: Pixels) -> dict[str, float]:
    """Returns the milliseconds of an encode, and of a decode step, the mean of a caption's first ``STEPS``
    steps."""
    inputs = captioner.encode(pixels)

    def steps() -> None:
        so_far = dict(inputs)
        for _ in range(STEPS):
            captioner.step(so_far)

    def encodes() -> None:
        for _ in range(STEPS):
            captioner.encode(pixels)

    return {"encode_ms": _each(encodes), "decode_step_ms": _each(steps)}


def _each(run: Callable[[], None]) -> float:
    """Returns the milliseconds of one of the steps of ``run``: the best of three times, after one that does not
    count."""
    best = float("inf")
    for stretch in range(4):
        began = time.perf_counter()
        run()
        if stretch:
            best = min(best, (time.perf_counter() - began) / STEPS * 1000)
    return best


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the export")
    parser.add_argument("--images", type=Path, required=True, help="folder with images and captions.json")
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    text = "CPU threads of one operation (default: all CPUs but one, as in the server)"
    parser.add_argument("--threads", type=count, default=max(len(os.sched_getaffinity(0)) - 1, 1), help=text)
    parser.add_argument("--batches", type=counts, default=[1], help="batch sizes, such as 1,4,16")
    parser.add_argument(
        "--rows", type=counts, default=[1, 4, 8], help="numbers of rows of encodes and steps, such as 1,4,8"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each batch size")
    options = parser.parse_args()
    captioner = Captioner(options.model, options.threads)
    mark("ready")
    samples = read_images(options.images)
    images = [captioner.pixels(data) for data, _ in samples]
    for pixels, (_, caption) in zip(images, samples, strict=True):
        (tokens,) = captioner.generate(pixels[None])
        if caption is not None and captioner.text(tokens) != caption:
            raise RuntimeError(f"a wrong caption: {captioner.text(tokens)!r}, expected {caption!r}")

    def stacked(rows: int) -> Pixels:
        return np.stack((images * rows)[:rows])

    rates = {
        str(batch): measure(partial(captioner.generate, stacked(batch)), batch, options.seconds)
        for batch in options.batches
    }
    steps = {str(rows): measure_steps(captioner, stacked(rows)) for rows in options.rows}
    result({"concurrency": rates, "steps": steps, **memory()})


if __name__ == "__main__":
    main()
