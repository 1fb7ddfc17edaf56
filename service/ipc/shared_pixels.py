"""Shares decoded pixels between the HTTP process and the engine process, in one slot of memory for each request.

An image may exploit a codec and control its decode process, so decode processes cannot reach the slots. Such a
process writes pixels into a file of one image that it shares only with the HTTP process, which copies them into a
slot. A slot takes memory when it is first used. The files have no name, so no file is left behind.
"""

import math
import mmap
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from snapcap.warmup.machine.denied import memory_file, seal

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class SharedPixels:
    """Holds the slots of a server, each uint8 [H, W, 3]. The process that makes the file passes it to the other
    process. Each opens the slots when it knows the image size."""

    def __init__(self, slots: int, file: int | None = None) -> None:
        """Makes the file, or uses ``file``, the descriptor in this process of a file that another process made."""
        self.slots = slots
        self.file = memory_file("snapcap-pixels") if file is None else file
        self._shape: tuple[int, ...] = ()
        self._memory: mmap.mmap | None = None
        self._views: list[Pixels] = []

    def close(self) -> None:
        """Closes the file, in a process that does not use it and has not opened the slots."""
        os.close(self.file)

    def release(self) -> None:
        """Gives the memory of the slots back, in a process that has opened them and uses none any more."""
        self._views.clear()
        self._memory = None  # unmapped with the last view of a slot
        os.close(self.file)

    def open(self, image_size: tuple[int, int]) -> None:
        """Maps the slots, each for an image of (height, width)."""
        self._shape = (self.slots, *image_size, 3)
        os.ftruncate(self.file, math.prod(self._shape))  # both processes set the same size
        seal(self.file)
        self._memory = mmap.mmap(self.file, math.prod(self._shape))

    def copy(self, slot: int, file: int) -> None:
        """Copies the image in an ``image_file`` into a slot.

        The file is read instead of mapped: a decode process could truncate a file that is not sealed, and reading
        a truncated mapping kills the reader.

        Raises:
            ValueError: the file has less than a whole image.
        """
        size = math.prod(self._shape[1:])
        with memoryview(self._mapped()) as all_slots, all_slots[slot * size : (slot + 1) * size] as view:
            read = os.preadv(file, [view], 0)
        if read != size:
            raise ValueError(f"{read} bytes of pixels, a slot has {size}")

    def read(self, slot: int) -> "Pixels":
        """Returns a view of the slot, uint8 [H, W, 3]."""
        if not self._views:
            import numpy as np  # noqa: PLC0415  not needed in a process that only passes slots on

            self._views = list(np.frombuffer(self._mapped(), dtype=np.uint8).reshape(self._shape))
        return self._views[slot]

    def _mapped(self) -> mmap.mmap:
        if self._memory is None:
            raise RuntimeError("the slots are not open yet")
        return self._memory


def image_file(size: tuple[int, int]) -> int:
    """Returns the descriptor of a new memory file for one image of (height, width), uint8 [H, W, 3].

    Raises:
        OSError: no memory is left for it.
    """
    file = memory_file("snapcap-image")
    os.ftruncate(file, math.prod(size) * 3)
    seal(file)
    return file


def write_image(file: int, pixels: bytes | bytearray) -> None:
    """Writes the pixels of one image into its file.

    Raises:
        ValueError: the file has another size than the pixels.
        OSError: memory or the disk has no room for all pixels.
    """
    size = os.lseek(file, 0, os.SEEK_END)  # lseek is allowed in a confined process, unlike opening a file
    if len(pixels) != size:
        raise ValueError(f"{len(pixels)} bytes of pixels for a file of {size}")
    rest, at = memoryview(pixels), 0
    while rest:  # a call writes a part where memory or the disk fills up, and the next call fails
        written = os.pwrite(file, rest, at)
        rest, at = rest[written:], at + written


class Slots:
    """Hands out the numbers of free slots in the HTTP process. Its methods may be called from any thread."""

    def __init__(self, count: int) -> None:
        # The slot that was given back last is taken next, because its memory is already allocated.
        self._free = deque(range(count))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Takes a free slot. Raises IndexError if there is none, which a sufficient `count` rules out."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
