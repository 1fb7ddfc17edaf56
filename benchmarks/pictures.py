"""Measures what a picture costs a decode process, by family of models, with Pillow and with the image library.

    python -m snapcap.benchmarks.pictures [--calls 25]

The picture is a JPEG of 500 × 375, and the processors are those of published checkpoints. The program compiles the
image library as a build does, compares its pixels with Pillow's, and prints a table of CPU milliseconds: the least
of many calls. Nothing is normalised here, as the encoder does that on its device.
"""

import io
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from PIL import Image

from snapcap.benchmarks.harness.arguments import count, make_parser
from snapcap.benchmarks.harness.workload import FIRST_IMAGE, open_workload
from snapcap.models.processing.resample import Resampler
from snapcap.models.processing.transform import ImageTransform
from snapcap.warmup.artifacts.manifest import IMAGE_LIBRARY
from snapcap.warmup.build.library_worker import LibraryJob, start

FAMILIES = {
    "smolvlm": ImageTransform((512, 512), resample=1, longest_edge=2048),
    "florence2": ImageTransform((768, 768), resample=3),
    "blip": ImageTransform((384, 384), resample=3),
    "clip": ImageTransform((224, 224), resample=3, resize_to=224, do_center_crop=True),
    "vit": ImageTransform((224, 224)),
}


def cpu_ms(call: Callable[[], object], calls: int) -> float:
    """Returns the least CPU milliseconds of several calls."""
    least = float("inf")
    for _ in range(calls):
        began = time.thread_time()
        call()
        least = min(least, time.thread_time() - began)
    return least * 1000


def measure(transform: ImageTransform, resampler: Resampler, data: bytes, calls: int) -> dict[str, float]:
    """Returns CPU milliseconds by part.

    Raises:
        RuntimeError: the library's pixels are not Pillow's.
    """
    faster = replace(transform, resampler=resampler)
    pixels = faster.decode(data).rgb
    if pixels != transform.decode(data).rgb:
        raise RuntimeError("the library's pixels are not Pillow's")
    file, slot = os.memfd_create("picture"), bytearray(len(pixels.data))
    jpeg = cpu_ms(lambda: Image.open(io.BytesIO(data)).load(), calls)
    pillow, library = (cpu_ms(partial(each.decode, data), calls) for each in (transform, faster))
    write = cpu_ms(lambda: os.pwrite(file, pixels.data, 0), calls)
    read = cpu_ms(lambda: os.preadv(file, [slot], 0), calls)
    os.close(file)
    return {
        "JPEG": jpeg,
        "resize, Pillow": pillow - jpeg,
        "resize, library": library - jpeg,
        "Pillow ÷ library": (pillow - jpeg) / (library - jpeg),
        "into the process's file": write,
        "from there into a slot": read,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--calls", type=count, default=25, help="calls of each part (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        data, _ = open_workload("demo", Path(name)).images[FIRST_IMAGE]
        start(LibraryJob(Path(name)))({"entry": IMAGE_LIBRARY})
        resampler = Resampler.open(str(Path(name) / IMAGE_LIBRARY))
    if resampler is None:
        raise SystemExit("the image library cannot be used here")
    rows = {family: measure(each, resampler, data, options.calls) for family, each in FAMILIES.items()}
    columns = list(next(iter(rows.values())))
    print("| CPU ms | " + " | ".join(columns) + " |\n|---" + "|---" * len(columns) + "|")
    for family, found in rows.items():
        print(f"| {family} | " + " | ".join(f"{found[column]:.2f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
