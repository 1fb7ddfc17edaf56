"""Measures the ONNX Runtime captioner without a server, in a process of its own, to compare the engine with.

    python -m snapcap.benchmarks.peers.onnx.generate --model FOLDER --images FOLDER [--batches 1,4]

Prints one result line: for each batch size captions/s and percentiles of a whole batch, images decoded before, and
milliseconds of an encode and of a decode step at some numbers of rows.
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
    """Milliseconds of an encode, and of a decode step, the mean of the first that a caption takes."""
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
    """Milliseconds of one of the steps of ``run``; the best of three times, after one that does not count."""
    best = float("inf")
    for stretch in range(4):
        began = time.perf_counter()
        run()
        if stretch:
            best = min(best, (time.perf_counter() - began) / STEPS * 1000)
    return best


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--images", type=Path, required=True, help="folder with images and captions.json")
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    text = "of one operation (default: one less than CPUs, as the server has it)"
    parser.add_argument("--threads", type=count, default=max(len(os.sched_getaffinity(0)) - 1, 1), help=text)
    parser.add_argument("--batches", type=counts, default=[1], help="as 1,4,16")
    parser.add_argument("--rows", type=counts, default=[1, 4, 8], help="of encodes and steps, as 1,4,8")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each batch size")
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
