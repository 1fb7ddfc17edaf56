"""Shares decoded pixels between the processes of a server, in one slot of memory for each request that waits.

Each request that waits has a slot. Only what was once in use takes memory, and nothing is left behind: the file has
no name.
"""

import math
import mmap
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.denied import memory_file

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class FilledSlot:
    """Pixels that are in their slot already."""

    number: int


class SharedPixels:
    """One process makes it and hands it to the others; each opens it when it knows the size of images."""

    def __init__(self, slots: int, file: int | None = None) -> None:
        """``file``: its descriptor in this process, where another one has made it."""
        self.slots = slots
        self.file = memory_file("snapcap-pixels") if file is None else file
        self._shape: tuple[int, ...] = ()
        self._memory: mmap.mmap | None = None
        self._views: list[Pixels] = []

    def open(self, image_size: tuple[int, int]) -> None:
        """Map the slots, each for an image of (height, width)."""
        self._shape = (self.slots, *image_size, 3)
        os.ftruncate(self.file, math.prod(self._shape))  # by every process, to the same size
        self._memory = mmap.mmap(self.file, math.prod(self._shape))

    def write(self, slot: int, pixels: "Pixels") -> None:
        self.read(slot)[:] = pixels

    def write_bytes(self, slot: int, pixels: bytes) -> None:
        """As ``write``, of the same values in a row.

        Raises:
            ValueError: they are not those of one image.
        """
        size = math.prod(self._shape[1:])
        if len(pixels) != size:
            raise ValueError(f"{len(pixels)} bytes of pixels, a slot has {size}")
        self._mapped()[slot * size : (slot + 1) * size] = pixels

    def read(self, slot: int) -> "Pixels":
        """The slot itself, not a copy."""
        if not self._views:
            self._views = self._all()
        return self._views[slot]

    def _all(self) -> "list[Pixels]":
        import numpy as np  # noqa: PLC0415  which a process that only hands slots on does not need

        return list(np.frombuffer(self._mapped(), dtype=np.uint8).reshape(self._shape))

    def _mapped(self) -> mmap.mmap:
        if self._memory is None:
            raise RuntimeError("the slots are not open yet")
        return self._memory


class Slots:
    """Those that nobody holds, in the HTTP process. From any thread."""

    def __init__(self, count: int) -> None:
        # The last one given back is taken next: its memory is there.
        self._free = deque(range(count))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Raises IndexError where there is none, which `count` must rule out."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
