"""Opens pictures with Pillow's plugin for their format, and finds out what Pillow does not tell of them."""

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

# Pillow's plugins: these are imported with this module, those of rarer formats with the first such picture, or by
# `load_codecs`.
_PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
_RARE = {
    "gif": "PIL.GifImagePlugin",
    "bmp": "PIL.BmpImagePlugin",
    "tiff": "PIL.TiffImagePlugin",
    "avif": "PIL.AvifImagePlugin",
    "heic": "pillow_heif",
}

# Pillow's modules that its plugins import with the first picture that needs them.
_LATE = ("PIL.ImageCms", "PIL.ImageColor", "PIL.ImagePalette", "PIL.MpoImagePlugin", "PIL.PpmImagePlugin")

# What Pillow raises on damaged data, found by mutating files of every format.
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

# Neither byte nor its complement is 0xFF, which begins a marker, or 0.
_NOISE = bytes(number * 73 % 251 + 2 for number in range(256))
_OTHER_NOISE = bytes(255 - number for number in _NOISE)


def load_codecs() -> None:
    """Import all that decoding a picture of any format may import, for processes that can open no file then."""
    for module in _LATE:
        import_module(module)
    for encoding in ("utf-16", "utf-8-sig"):  # in which a text that is no picture may be written
        codecs.lookup(encoding)
    for name, module in _RARE.items():
        if not is_readable(name):
            continue
        plugin: Any = import_module(module)
        # A thread takes address space, of which each such process has only what its picture needs.
        if name == "avif":
            plugin.DEFAULT_MAX_THREADS = 1
        elif name == "heic":
            plugin.options.DECODE_THREADS = 1


def opened(data: bytes, name: str) -> Image.Image:
    """The picture with its header read, by the plugin of the format that is named."""
    if name == "heic":
        opened: Image.Image = _plugin(name).HeifImageFile(io.BytesIO(data))
        return opened
    if name in _RARE:
        _plugin(name)
    return Image.open(io.BytesIO(data), formats=(name.upper(),))


def _plugin(name: str) -> Any:
    return import_module(_RARE[name])


def unended(data: bytes) -> bytes:
    """A JPEG without an end marker, as it is decoded."""
    return ended(data, _NOISE)


def draft(image: Image.Image, least: tuple[int, int]) -> tuple[float, float, float, float] | None:
    """Let a large JPEG be decoded at a fraction of its size; returns the part of the result that it fills."""
    if not isinstance(image, JpegImagePlugin.JpegImageFile):
        return None
    full = image.size
    drafted = image.draft(None, (2 * least[0], 2 * least[1]))
    return drafted[1] if drafted and image.size != full else None


def check_whole(data: bytes, image: Image.Image, least: tuple[int, int] | None) -> None:
    """Refuse a JPEG without an end marker that lacks more than that.

    A decoder makes up what is missing from the bytes that follow. So two are decoded that go on with different
    noise, and only a picture that needs none of it comes out the same.
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
    """The checksum of the pixels, a few rows at a time."""
    image.load()
    checksum = 0
    for top in range(0, image.height, 64):
        rows = image.crop((0, top, image.width, min(top + 64, image.height)))
        checksum = zlib.crc32(rows.tobytes(), checksum)
    return checksum


def lower_halves(header: Header) -> Image.Image:
    """The low bytes of a PNG of 16-bit colours, of which Pillow keeps the high ones."""
    low = opened(header.data, "png")
    # The samples' first byte is the high one: read the other way round, the second is.
    low.tile = [tile._replace(args="RGB;16L") for tile in low.tile]  # type: ignore[attr-defined]
    low.load()
    return low


def turn(image: Image.Image) -> Image.Transpose | None:
    """What brings an image upright."""
    try:
        return _UPRIGHT.get(image.getexif().get(_ORIENTATION_TAG, 1))
    except DAMAGED:  # of the EXIF block; the pixels may be good
        return None
