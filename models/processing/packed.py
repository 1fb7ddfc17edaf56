"""Packs a picture of any shape into an array of one size, for encoders that take pictures of any shape.

The array is uint8 [tokens + 1, 1024, 3]: a row for each token, which holds the 32 × 32 pixels that become the
token, and a last row that begins with the picture's grid. Tokens lie from left to right, then down. Rows behind
the grid's tokens hold zeros. So a picture takes the same memory whatever its shape, and its grid travels with it.
"""

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.resample import Pixels, Size

if TYPE_CHECKING:
    import numpy as np

    Packed = np.ndarray[Any, np.dtype[np.uint8]]

SIDE = 32  # pixels of a token's side
TOKEN_PIXELS = SIDE * SIDE
TOKEN_BYTES = 3 * TOKEN_PIXELS
THINNEST = 200  # greatest ratio of a picture's sides
_GRID = struct.Struct("<HH")  # rows and columns


def fitting_size(width: int, height: int, least: int, most: int) -> Size:
    """Returns (width, height) of a picture after the resize: multiples of 32 with an area from ``least`` to
    ``most`` pixels, by the arithmetic of transformers' ``smart_resize``. Raises ImageError if one side is more than
    200 times as long as the other."""
    if max(height, width) / min(height, width) > THINNEST:
        raise ImageError(
            "wrong_size",
            f"an image of {width}×{height} pixels is too thin: one side is over {THINNEST} times the other; "
            "cut a part out of it",
        )
    rows, columns = round(height / SIDE), round(width / SIDE)
    if rows * columns * TOKEN_PIXELS > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / scale / SIDE)) for side in (height, width))
    elif rows * columns * TOKEN_PIXELS < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * scale / SIDE) for side in (height, width))
    return columns * SIDE, rows * SIDE


def most_tokens(least: int, most: int) -> int:
    """Returns the number of tokens that no picture exceeds after ``fitting_size``.

    Very thin pictures may take more tokens than ``most`` pixels have: a side is rounded up to a token.
    """
    smallest, largest = least / TOKEN_PIXELS, most / TOKEN_PIXELS
    rounded_up = smallest + math.sqrt(smallest / THINNEST) + math.sqrt(smallest * THINNEST) + 1
    return math.floor(max(largest, rounded_up, math.sqrt(largest * THINNEST)))


def pack(picture: Pixels, tokens: int) -> Pixels:
    """Packs an RGB picture, whose sides are multiples of 32, into an array for ``tokens`` tokens. Raises ImageError
    if the picture has more tokens, or other sides."""
    width, height = picture.size
    columns, rows = width // SIDE, height // SIDE
    if width % SIDE or height % SIDE or not 0 < rows * columns <= tokens:
        raise ImageError(
            "wrong_size", f"an image of {width}×{height} pixels does not make 1 to {tokens} tokens of {SIDE}×{SIDE}"
        )
    image = picture.image()
    strips = [image.crop((left, 0, left + SIDE, height)).tobytes() for left in range(0, width, SIDE)]
    parts = [strip[row * TOKEN_BYTES : (row + 1) * TOKEN_BYTES] for row in range(rows) for strip in strips]
    parts += [bytes((tokens - rows * columns) * TOKEN_BYTES), _GRID.pack(rows, columns).ljust(TOKEN_BYTES, b"\0")]
    return Pixels((TOKEN_PIXELS, tokens + 1), b"".join(parts))


def grid_of(packed: "Packed") -> tuple[int, int]:
    """Returns the rows and columns of tokens of a packed picture.

    A process that decodes pictures is not trusted: numbers that the array has no room for are made smaller.
    """
    tokens = len(packed) - 1
    rows, columns = _GRID.unpack(packed[-1].reshape(-1)[: _GRID.size].tobytes())
    rows = min(max(rows, 1), tokens)
    return rows, min(max(columns, 1), tokens // rows)


def examples(image_size: Size, token_buckets: Sequence[int]) -> "list[Packed]":
    """Returns black pictures [height, width, 3], as an encoder of ``image_size`` takes them: one for each number of
    tokens, or only one without such numbers."""
    import numpy as np  # noqa: PLC0415 - a process that only decodes does without numpy

    pictures = [np.zeros((*image_size, 3), np.uint8) for _ in token_buckets or (0,)]
    return [write_grid(each, 1, tokens) for each, tokens in zip(pictures, token_buckets, strict=False)] or pictures


def write_grid(packed: "Packed", rows: int, columns: int) -> "Packed":
    """Writes a grid into a packed picture. Returns the picture."""
    packed[-1].reshape(-1)[: _GRID.size] = list(_GRID.pack(rows, columns))
    return packed
