"""Bytes of a picture -> an upright RGB picture, with every way they can be bad told apart.

Only JPEG, PNG and WEBP are read, and of an animation the first frame. The size is checked from the header,
before a pixel is decoded: 236 KB of PNG can hold 300 MB.
"""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Literal

import numpy as np
from PIL import Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError, WebPImagePlugin

Reason = Literal["empty", "not_an_image", "truncated", "too_large", "zero_size", "unsupported_format", "wrong_size"]

# The plugins are named here because Image.open would import all forty to find WEBP. A JPEG that holds several
# pictures (MPO, which phones write) opens through the JPEG plugin.
_PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
_FORMATS = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png", "WEBP": "webp"}
_READ = "send JPEG, PNG or WEBP"

# What Pillow raises on damaged data, found by mutating files of the three formats.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    zlib.error,
)

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(ValueError):
    """A picture that cannot be read. The message says what to do; ``reason`` is a label for metrics."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def open_image(data: bytes, max_pixels: int) -> tuple[Image.Image, str]:
    """Read the header of a picture and check its size; no pixel is decoded.

    Returns:
        The lazy Pillow image and its format, one of ``jpeg``, ``png`` and ``webp``.

    Raises:
        ImageError: every reason but ``wrong_size``.
    """
    if not data:
        raise ImageError("empty", f"the image is empty; {_READ}")
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large("", max_pixels) from None
    except UnidentifiedImageError:
        raise _unidentified(data) from None
    except _DAMAGED:
        raise _damaged(_sniff(data)) from None
    width, height = image.size
    if width * height > max_pixels:
        raise _too_large(f" of {width}×{height} pixels", max_pixels)
    return image, _FORMATS[image.format or ""]


def load_resized(image: Image.Image, resized: Callable[[int, int], tuple[int, int]], resample: int) -> Image.Image:
    """Decode an opened image and resize it into upright RGB.

    A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size, to no less than twice the size that is wanted
    (Pillow's ``draft``): libjpeg then averages blocks in the frequency domain, three times faster for a photo
    from a camera. The mean difference to a full decode is below half of one of 255 steps, at most 5 of them
    inside the picture and more in the last row or column, which may hold a part of a block.

    Args:
        resized: (width, height) of the upright picture -> (width, height) that is wanted.
        resample: Pillow's number of the filter.

    Raises:
        ImageError: ``truncated``.
    """
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        full, swap = image.size, _swaps_sides(_turn(image))
        target = _swapped(resized(*_swapped(full, swap)), swap)
        drafted = image.draft(None, (2 * target[0], 2 * target[1]))
        if drafted and image.size != full:
            rgb, method = _load_rgb(image)
            # The picture fills only the box: a width of 3001 becomes 375.125 pixels, stored as 376.
            return _upright(rgb.resize(target, Image.Resampling(resample), box=drafted[1]), method)
    rgb = load_upright(image)
    target = resized(*rgb.size)
    return rgb if rgb.size == target else rgb.resize(target, Image.Resampling(resample))


def load_upright(image: Image.Image) -> Image.Image:
    """Decode an opened image into upright RGB.

    Transparent pixels are laid on white. transformers drops the alpha channel, which shows whatever colour
    was left under it, mostly black: what no viewer of the picture sees. Opaque pictures come out as there.
    Of 16-bit greys the high byte is kept, as Pillow does for 16-bit colours; in transformers all above 255
    are white.

    Raises:
        ImageError: ``truncated``, the data ends early or is damaged.
    """
    return _upright(*_load_rgb(image))


def _load_rgb(image: Image.Image) -> tuple[Image.Image, Image.Transpose | None]:
    name = _FORMATS.get(image.format or "", "image")
    try:
        image.load()
        return _rgb(image), _turn(image)
    except _DAMAGED:
        raise _damaged(name) from None


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What brings an image upright: of a JPEG it is known from the header, of others once pixels are loaded."""
    try:
        return _UPRIGHT.get(image.getexif().get(_ORIENTATION_TAG, 1))
    except _DAMAGED:  # of the EXIF block; the pixels may be good
        return None


def _upright(image: Image.Image, method: Image.Transpose | None) -> Image.Image:
    return image if method is None else image.transpose(method)


def _swaps_sides(method: Image.Transpose | None) -> bool:
    return method is not None and method not in (
        Image.Transpose.FLIP_LEFT_RIGHT,
        Image.Transpose.FLIP_TOP_BOTTOM,
        Image.Transpose.ROTATE_180,
    )


def _swapped(size: tuple[int, int], swap: bool) -> tuple[int, int]:
    return (size[1], size[0]) if swap else size


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow's own conversion clips 16 bits to 255 instead of scaling
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy what is RGB
    rgba = image.convert("RGBA")
    alpha = rgba.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return rgba.convert("RGB")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=alpha)
    return white


def _sniff(data: bytes) -> str:
    """The format that the first bytes announce, in lower case; ``""`` when it is none of the known ones."""
    for offset, signature, name in (
        (0, b"\xff\xd8\xff", "jpeg"),
        (0, b"\x89PNG\r\n\x1a\n", "png"),
        (8, b"WEBP", "webp"),
        (0, b"GIF8", "gif"),
        (0, b"II*\0", "tiff"),
        (0, b"MM\0*", "tiff"),
        (0, b"BM", "bmp"),
        (4, b"ftypavif", "avif"),
        (4, b"ftyphei", "heic"),
        (4, b"ftypmif1", "heic"),
        (0, b"%PDF", "pdf"),
        (0, b"<svg", "svg"),
    ):
        if data.startswith(signature, offset):
            return name
    return ""


def _unidentified(data: bytes) -> ImageError:
    name = _sniff(data)
    if not name:
        return ImageError("not_an_image", f"the data is not an image; {_READ}")
    if name not in _FORMATS.values():
        return ImageError("unsupported_format", f"{name.upper()} images are not read; {_READ}")
    if _zero_size(name, data):
        return ImageError("zero_size", "the image is 0 pixels wide or high; send one with at least one pixel")
    return _damaged(name)


def _zero_size(name: str, data: bytes) -> bool:
    """Whether a header that Pillow refused gives no width or no height."""
    if name == "png":
        return len(data) >= 24 and 0 in struct.unpack(">II", data[16:24])
    if name == "jpeg":
        frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))  # baseline or progressive start of frame
        return frame > 0 and len(data) >= frame + 9 and 0 in struct.unpack(">HH", data[frame + 5 : frame + 9])
    return False


def _damaged(name: str) -> ImageError:
    return ImageError("truncated", f"the {name.upper()} data is incomplete or damaged; send the whole file")


def _too_large(what: str, max_pixels: int) -> ImageError:
    return ImageError("too_large", f"an image{what} is over the limit of {max_pixels} pixels; scale it down first")
