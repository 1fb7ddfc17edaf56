"""Shares decoded pixels between the HTTP process and the engine process, in one slot of memory for each request.

A decode process, which an image may have taken over, has no part in it: it writes into a file of one image that it
shares with the HTTP process alone, which copies the pixels into the slot of their request. Only memory that was
once in use is taken, and nothing is left behind: no file has a name.
"""

import math
import mmap
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.denied import memory_file, seal

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class FilledSlot:
    """The number of a slot that has the pixels already."""

    number: int


class SharedPixels:
    """The slots of a server. One process makes them and hands the file to the other; each opens them when it knows
    the size of images."""

    def __init__(self, slots: int, file: int | None = None) -> None:
        """``file``: its descriptor in this process, where another one has made it."""
        self.slots = slots
        self.file = memory_file("snapcap-pixels") if file is None else file
        self._shape: tuple[int, ...] = ()
        self._memory: mmap.mmap | None = None
        self._views: list[Pixels] = []

    def close(self) -> None:
        """Give up the file, in a process that has no part in it and has not opened the slots."""
        os.close(self.file)

    def open(self, image_size: tuple[int, int]) -> None:
        """Map the slots, each for an image of (height, width)."""
        self._shape = (self.slots, *image_size, 3)
        os.ftruncate(self.file, math.prod(self._shape))  # by both processes, to the same size
        seal(self.file)
        self._memory = mmap.mmap(self.file, math.prod(self._shape))

    def write(self, slot: int, pixels: "Pixels") -> None:
        self.read(slot)[:] = pixels

    def copy(self, slot: int, file: int) -> None:
        """Copy the image in a file of ``image_file`` into the slot.

        The file is read and not mapped: its writer could cut a file that is not sealed, which ends a process that
        has it mapped.

        Raises:
            ValueError: the file has no whole image.
        """
        size = math.prod(self._shape[1:])
        with memoryview(self._mapped()) as all_slots, all_slots[slot * size : (slot + 1) * size] as view:
            read = os.preadv(file, [view], 0)
        if read != size:
            raise ValueError(f"{read} bytes of pixels, a slot has {size}")

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


def image_file(size: tuple[int, int]) -> int:
    """The descriptor of a new file in memory for one image of (height, width), uint8 [H, W, 3].

    Raises:
        OSError: there is no memory for it.
    """
    file = memory_file("snapcap-image")
    os.ftruncate(file, math.prod(size) * 3)
    seal(file)
    return file


def write_image(file: int, pixels: bytes) -> None:
    """Write the pixels of one image into its file.

    Raises:
        ValueError: the file is of another size.
    """
    size = os.lseek(file, 0, os.SEEK_END)  # which a process that may open no file may call
    if len(pixels) != size:
        raise ValueError(f"{len(pixels)} bytes of pixels for a file of {size}")
    os.pwrite(file, pixels, 0)


class Slots:
    """The numbers of free slots, in the HTTP process. From any thread."""

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
