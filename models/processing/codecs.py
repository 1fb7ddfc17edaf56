"""Opens pictures with Pillow's plugin for their format, and finds out facts about them that Pillow hides."""

import codecs
import io
import struct
import zlib
from importlib import import_module
from typing import Any

from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from snapcap.models.processing.headers.header import Header, damaged
from snapcap.models.processing.headers.jpeg import covers_all, ended
from snapcap.models.processing.image_formats import is_readable

# Plugins of common formats are imported with this module. Plugins of rarer formats are imported with the first
# such picture, or by `load_codecs`.
_PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
_RARE = {
    "gif": "PIL.GifImagePlugin",
    "bmp": "PIL.BmpImagePlugin",
    "tiff": "PIL.TiffImagePlugin",
    "avif": "PIL.AvifImagePlugin",
    "heic": "pillow_heif",
}

# Modules of Pillow that its plugins import with the first picture that needs them.
_LATE = ("PIL.ImageCms", "PIL.ImageColor", "PIL.ImagePalette", "PIL.MpoImagePlugin", "PIL.PpmImagePlugin")

# Pillow's errors on damaged data, found by mutating files of every format.
DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    AttributeError,
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

# The noise has no byte 0xFF, which begins a marker, and no byte 0. Neither has its complement.
_NOISE = bytes(number * 73 % 251 + 2 for number in range(256))
_OTHER_NOISE = bytes(255 - number for number in _NOISE)


def load_codecs() -> None:
    """Imports everything that decoding a picture may import, for processes that cannot open files later."""
    for module in _LATE:
        import_module(module)
    for encoding in ("utf-16", "utf-8-sig"):  # encodings of text files, which are recognised to be refused
        codecs.lookup(encoding)
    for name, module in _RARE.items():
        if not is_readable(name):
            continue
        plugin: Any = import_module(module)
        # Each decoder process may use only the address space that its picture needs, and a thread takes some of
        # it.
        if name == "avif":
            plugin.DEFAULT_MAX_THREADS = 1
        elif name == "heic":
            plugin.options.DECODE_THREADS = 1


def opened(data: bytes, name: str) -> Image.Image:
    """Returns the picture with its header read, by the plugin of format ``name``."""
    if name == "heic":
        opened: Image.Image = _plugin(name).HeifImageFile(io.BytesIO(data))
        return opened
    if name in _RARE:
        _plugin(name)
    return Image.open(io.BytesIO(data), formats=(name.upper(),))


def _plugin(name: str) -> Any:
    return import_module(_RARE[name])


def unended(data: bytes) -> bytes:
    """Returns a JPEG without an end marker in the form in which it is decoded."""
    return ended(data, _NOISE)


def draft(image: Image.Image, least: tuple[int, int]) -> tuple[float, float, float, float] | None:
    """Lets a large JPEG be decoded at a fraction of its size. Returns the part of the result that the picture
    fills."""
    if not isinstance(image, JpegImagePlugin.JpegImageFile):
        return None
    full = image.size
    drafted = image.draft(None, (2 * least[0], 2 * least[1]))
    return drafted[1] if drafted and image.size != full else None


def check_whole(data: bytes, image: Image.Image, least: tuple[int, int] | None) -> None:
    """Refuses a JPEG that lacks more than its end marker.

    A decoder makes up missing data from the bytes that follow. So the picture is decoded twice, with different
    noise behind its data: only a complete picture comes out the same.

    Raises:
        ImageError: ``truncated``.
    """
    if not covers_all(data):
        raise damaged("jpeg")
    try:
        with opened(ended(data, _OTHER_NOISE), "jpeg") as other:
            if least is not None:
                draft(other, least)
            checksum = _checksum(other)
        same = checksum == _checksum(image)
    except DAMAGED:
        same = False
    if not same:
        raise damaged("jpeg")


def _checksum(image: Image.Image) -> int:
    """Returns a checksum of the pixels, computed a few rows at a time to save memory."""
    image.load()
    checksum = 0
    for top in range(0, image.height, 64):
        rows = image.crop((0, top, image.width, min(top + 64, image.height)))
        checksum = zlib.crc32(rows.tobytes(), checksum)
    return checksum


def lower_halves(header: Header) -> Image.Image:
    """Returns the low bytes of a PNG of 16-bit colours. Pillow itself keeps the high bytes."""
    low = opened(header.data, "png")
    # A sample's first byte is the high one. In the other byte order, the second byte is.
    low.tile = [tile._replace(args="RGB;16L") for tile in low.tile]  # type: ignore[attr-defined]
    low.load()
    return low


def turn(image: Image.Image) -> Image.Transpose | None:
    """Returns the transposition that turns the image upright, or None if there is none to do."""
    try:
        return _UPRIGHT.get(image.getexif().get(_ORIENTATION_TAG, 1))
    except DAMAGED:  # the EXIF block is damaged; the pixels may be good
        return None
