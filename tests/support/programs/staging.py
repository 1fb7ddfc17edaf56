"""Copies images to a CUDA device as a compiled start does, without torch; prints what came otherwise as JSON.

python -m support.programs.staging
"""

import json
import time

import numpy as np

from snapcap.warmup.machine.torch_libraries import load_torch_libraries
from snapcap.warmup.runtime.aoti.native import Libtorch
from snapcap.warmup.runtime.aoti.native_cuda import CudaRuntime, NativeCudaDevice

# Number and size of images: as many as a piece of pinned memory holds, one more than several pieces hold, and
# images that are larger than a piece.
CASES = ((1, 224), (27, 224), (113, 224), (64, 768), (5, 1200), (1, 1200))


def main() -> None:
    library = load_torch_libraries()
    assert library is not None
    cuda = CudaRuntime(library, 0)
    device = NativeCudaDevice(Libtorch(library, 0), cuda)
    wrong: list[tuple[int, int, int]] = []
    seconds: dict[str, float] = {}
    for count, side in CASES:
        pixels = device.memory.zeros("uint8", (count + 1, side, side, 3))
        slots = device.memory.zeros("int64", (count + 1,))
        staging = device.staging(pixels, slots)
        for seed in (0, 1):  # the second batch takes the place of the first
            images = list(np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8))
            started = time.perf_counter()
            staging.copy(images, range(count, 0, -1))
            device.wait()
            seconds[f"{count} of {side}"] = time.perf_counter() - started
            same = np.array_equal(device.read(pixels)[:count], images)
            if not same or device.read(slots).tolist() != [*range(count, 0, -1), 0]:
                wrong.append((count, side, seed))
    print(json.dumps({"wrong": wrong, "seconds": seconds}))


if __name__ == "__main__":
    main()
