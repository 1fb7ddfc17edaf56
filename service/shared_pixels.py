"""Pixels on their way from the threads that decode to the device: memory that both processes see.

Each request that waits has a slot. Only what was once in use takes memory, and nothing is left behind: the file has
no name.
"""

import math
import mmap
import os
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class SharedPixels:
    """Made before the fork; each process opens it when it knows the size of the model's images."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._file = _nameless_file()
        self._views: list[Pixels] = []

    def open(self, image_size: tuple[int, int]) -> None:
        """Map the slots, each for an image of (height, width)."""
        import numpy as np  # noqa: PLC0415  which a server must not wait for before it listens

        shape = (self.slots, *image_size, 3)
        os.ftruncate(self._file, math.prod(shape))  # by both processes, to the same size
        memory = mmap.mmap(self._file, math.prod(shape))
        self._views = list(np.frombuffer(memory, dtype=np.uint8).reshape(shape))

    def write(self, slot: int, pixels: "Pixels") -> None:
        self._views[slot][:] = pixels

    def read(self, slot: int) -> "Pixels":
        """The slot itself, not a copy."""
        return self._views[slot]


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("snapcap-pixels")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
