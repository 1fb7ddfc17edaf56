"""Resizes pictures as Pillow does, with a compiled library if there is one, which takes a fraction of the time.

The library's C++ sources are in `cpp` beside this file. A build compiles it into the artifact set. Its results
equal Pillow's in every bit, and `Resampler.open` checks that.
"""

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from snapcap.models.dataclass import dataclass

if TYPE_CHECKING:
    from PIL import Image

SOURCES = Path(__file__).parent / "cpp"

Size = tuple[int, int]
Box = tuple[float, float, float, float]

_SERVED = range(1, 6)  # Pillow's numbers of filters; 0 takes the nearest pixel, and costs little
# Filter, box and sizes of the resizes by which the library is compared with Pillow.
_COMPARED: tuple[tuple[int, Box | None, tuple[Size, ...]], ...] = (
    (1, None, ((60, 31), (13, 24))),
    (2, (0, 0, 38.5, 90.25), ((33, 20),)),
    (3, None, ((35, 12),)),
)
_logger = logging.getLogger("snapcap.decode")


class Pixels(NamedTuple):
    """Holds a picture in RGB, row by row. size: (width, height)."""

    size: Size
    data: bytes | bytearray

    def image(self) -> "Image.Image":
        from PIL import Image  # noqa: PLC0415 - a process that only passes images on does without Pillow

        return Image.frombytes("RGB", self.size, self.data)

    def cut(self, left: int, top: int, size: Size) -> "Pixels":
        """Returns a part of the picture."""
        width, height = size
        starts = ((row * self.size[0] + left) * 3 for row in range(top, top + height))
        return Pixels(size, b"".join([self.data[start : start + width * 3] for start in starts]))


@dataclass(frozen=True)
class Resampler:
    """Resizes pictures by a library's function ``snapcap_resize``.

    may_begin_down: Pillow begins with the pass from line to line if a picture loses far more lines than columns.
        Its versions differ in this.
    """

    function: "ctypes._NamedFuncPointer"
    may_begin_down: bool

    @classmethod
    def open(cls, name: str) -> "Resampler | None":
        """Opens the library of this file name. Returns None, and logs the reason, if it cannot be opened here or
        if it does not give the same as Pillow."""
        try:
            function = ctypes.CDLL(name).snapcap_resize
        except (OSError, AttributeError) as error:
            reason = str(error)
        else:
            for may_begin_down in (True, False):
                made = cls(function, may_begin_down)
                if made.equals_pillow():
                    return made
            reason = "its results are not those of this Pillow"
        _logger.warning("Pillow resizes pictures, not the compiled library", extra={"fields": {"reason": reason}})
        return None

    def equals_pillow(self) -> bool:
        """Returns whether a few small pictures come out the same."""
        from PIL import Image  # noqa: PLC0415 - a process that only passes images on does without Pillow

        noise = bytes(number * number * 7 // 3 % 251 for number in range(40 * 96 * 3))
        picture = Image.frombytes("RGB", (40, 96), noise)
        return all(
            self.resized(picture, filter_, sizes, box) == resized(picture, filter_, sizes, box)
            for filter_, box, sizes in _COMPARED
        )

    def resized(self, image: "Image.Image", filter_: int, sizes: Sequence[Size], box: Box | None = None) -> Pixels:
        """Resizes a picture in RGB to one size, or to two sizes in turn. The arguments are those of ``resized``.
        Raises MemoryError if there is not enough memory."""
        channels = [image.tobytes("raw", channel) for channel in "RGB"]
        (width, height), (last_width, last_height) = image.size, sizes[-1]
        both = (*sizes[0], *(sizes[1] if len(sizes) > 1 else (0, 0)))
        pixels = bytearray(last_width * last_height * 3)
        failed = self.function(
            (ctypes.c_char_p * 3)(*channels),
            width,
            height,
            (ctypes.c_float * 4)(*(box or (0, 0, width, height))),
            filter_,
            (ctypes.c_int32 * 4)(*both),
            self.may_begin_down,
            (ctypes.c_uint8 * len(pixels)).from_buffer(pixels),
        )
        if failed:
            raise MemoryError
        return Pixels(sizes[-1], pixels)


def resized(
    image: "Image.Image",
    filter_: int,
    sizes: Sequence[Size],
    box: Box | None = None,
    resampler: Resampler | None = None,
) -> Pixels:
    """Resizes a picture in RGB to each of the sizes in turn.

    Args:
        filter_: Pillow's number of the filter.
        sizes: (width, height) each. A size that the picture has already is passed over.
        box: (left, top, right, bottom) of the part that the first resize takes; None for all.
        resampler: makes the same in less time.
    """
    from PIL import Image  # noqa: PLC0415 - a process that only passes images on does without Pillow

    steps: list[Size] = []
    for size in sizes:
        if size != (steps[-1] if steps else image.size) or (box is not None and not steps):
            steps.append(size)
    if resampler is not None and filter_ in _SERVED and 1 <= len(steps) <= 2:
        return resampler.resized(image, filter_, steps, box)
    for size in steps:
        image, box = image.resize(size, Image.Resampling(filter_), box=box), None
    return Pixels(image.size, image.tobytes())
