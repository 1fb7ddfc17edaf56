"""Converts any Pillow image to RGB, with transparent pixels on white.

An image is converted strip by strip, so that no step takes the memory of a whole picture.
"""

import math
import sys
from collections.abc import Sequence

from PIL import Image, ImageChops

# Pixels of a strip that is converted at a time.
_STRIP = 1 << 18
_OPAQUE = (255, 255)


def to_rgb(
    image: Image.Image,
    key: Sequence[int] | None = None,
    low: Image.Image | None = None,
    frame: tuple[int, int, int, int] | None = None,
    inverted: bool = False,
) -> Image.Image:
    """Returns the image in RGB, or the same object if it is opaque RGB already.

    Args:
        image: with its pixels loaded.
        key: the transparent colour, in samples of 16 bits. A grey image holds all 16 bits.
        low: the low bytes of the samples of a colour image with a ``key``.
        frame: (left, top, right, bottom) outside of which the picture is transparent.
        inverted: 0 is white in a grey image of more than 8 bits.

    Raises:
        ValueError: Pillow does not convert this mode.
    """
    if image.mode == "RGB" and not (image.has_transparency_data or key or frame):
        return image
    # Programs without an alpha channel leave its bytes at 0.
    opaque = image.format == "BMP" and image.mode == "RGBA" and image.getextrema()[3:] == ((0, 0),)
    scale = _scale(image)
    whole = Image.new("RGB", image.size, "white")
    left, top, right, bottom = frame or (0, 0, *image.size)
    rows = max(_STRIP // image.width, 1)
    for start in range(top, bottom, rows):
        box = (left, start, right, min(start + rows, bottom))
        strip = image.crop(box).convert("RGBX") if opaque else image.crop(box)
        rgb = _rgb(strip, scale)
        if inverted:
            rgb = ImageChops.invert(rgb)
        if key:
            rgb.paste("white", mask=_equal(strip, key, low.crop(box) if low else None))
        whole.paste(rgb, box)
    return whole


def _rgb(image: Image.Image, scale: float) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow's own conversion clips 16 bits to 255 instead of scaling
        return _halves(image)[0].convert("RGB")
    if image.mode in ("I", "F"):
        return image.point(lambda value: value * scale).convert("L").convert("RGB")
    if image.mode == "La":  # Pillow converts this mode to no other
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    alpha = rgba.getchannel("A")
    if alpha.getextrema() == _OPAQUE:
        return rgba.convert("RGB")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=alpha)
    return white


def _scale(image: Image.Image) -> float:
    """Returns the factor that brings the numbers of a picture of 32 bits a pixel to 0 to 255.

    The largest number decides which value is white: up to 1 for floats it is 1, up to 255 it is 255, up to 65535
    for integers it is 65535. Above these limits it is the largest number itself.
    """
    if image.mode not in ("I", "F"):
        return 1.0
    _, extreme = image.getextrema()
    if isinstance(extreme, tuple):  # several bands, which these modes never have
        return 1.0
    largest = float(extreme)
    if not math.isfinite(largest):
        return 1.0
    if largest <= 1 and image.mode == "F":
        return 255.0
    if largest <= 255:
        return 1.0
    return 1 / 256 if image.mode == "I" and largest <= 65535 else 255 / largest


def _halves(image: Image.Image) -> tuple[Image.Image, Image.Image]:
    """Returns the high and the low bytes of 16-bit samples."""
    big = image.mode == "I;16B" or (image.mode == "I;16N" and sys.byteorder == "big")
    data = image.tobytes()
    first, second = (Image.frombytes("L", image.size, data[start::2]) for start in (0, 1))
    return (first, second) if big else (second, first)


def _equal(image: Image.Image, key: Sequence[int], low: Image.Image | None) -> Image.Image:
    """Returns a mask that is 255 where all 16 bits of every sample equal the key's."""
    uppers, lowers = (image.split(), low.split()) if low else tuple((each,) for each in _halves(image))
    mask = Image.new("L", image.size, 255)
    for upper, lower, value in zip(uppers, lowers, key, strict=True):
        for half, wanted in ((upper, value >> 8), (lower, value & 255)):
            mask = ImageChops.darker(mask, half.point([255 * (each == wanted) for each in range(256)]))
    return mask
