"""Decodes the bytes of an image into upright RGB, with a separate error for every way they can be bad.

Only the first picture of an animation or of several pages is read. The size, the memory for decoding and the parts
of the file are checked before a pixel is decoded: 236 KB of PNG can hold 300 MB.

An estimate of memory is never below the actual memory: tests decode each format and mode in a fresh process and
compare. A pixel's cost depends on the format.
"""

import codecs
import io
import math
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageChops, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from snapcap.models.processing.headers import (
    LONGEST_SIDE,
    Header,
    check_scans,
    covers_all,
    ended,
    read_bmp,
    read_gif,
    read_jpeg,
    read_png,
    read_webp,
)
from snapcap.models.processing.image_formats import (
    ImageError,
    NeedsMemory,
    damaged,
    is_readable,
    kind_of,
    not_a_picture,
    remedy,
    unsupported,
    zero_size,
)
from snapcap.models.processing.resample import Box, Pixels, Size, resized
from snapcap.models.processing.tiff import LAYOUTS, mend_tiles, read_tiff

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform

_HEADERS: dict[str, Callable[[bytes], Header]] = {
    "jpeg": read_jpeg,
    "png": read_png,
    "webp": read_webp,
    "gif": read_gif,
    "bmp": read_bmp,
    "tiff": read_tiff,
}

_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_MOST_RESIZED = 50_000_000  # pixels; 150 MB in RGB
# Limits of the AVIF decoder, and the box with the width and height of a picture or tile, near a file's beginning.
_AVIF_SIDE, _AVIF_PIXELS, _AVIF_HEAD = 1 << 15, 1 << 28, 1 << 16
_EXTENTS = re.compile(rb"ispe\0{4}(.{4})(.{4})", re.DOTALL)


def read_image(data: bytes, transform: "ImageTransform", room: int | None = None) -> tuple[Pixels, str, Size]:
    """Decodes a picture into upright RGB, and resizes it as the transform says.

    A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size, but at no less than twice the target size (Pillow's
    ``draft``). libjpeg then averages blocks in the frequency domain, three times faster for a photo from a camera.
    The mean difference to a full decode is below half of one of 255 steps. The greatest difference is 5 steps
    inside the picture, and more in the last row or column, which may hold a part of a block.

    Transparent pixels are put on white. transformers drops the alpha channel, and so shows the colour under
    transparent pixels, mostly black, which no viewer shows. Opaque pictures come out the same as in transformers.
    The high byte of 16-bit greys is kept, as Pillow does for 16-bit colours. In transformers all greys above 255
    are white.

    Args:
        room: greatest number of bytes of memory for decoding. None sets no limit.

    Returns:
        The picture, its format, one of ``READ``, and the (width, height) that it had upright.

    Raises:
        ImageError: with any reason except ``wrong_size``.
        NeedsMemory: decoding takes more than ``room``.
    """
    header = _read_header(data)
    if header.size is not None:
        _check_size(header.size, transform.max_pixels)
    name, final = header.format, transform.second_size
    if name == "webp" and header.size is not None:  # opening it makes a canvas of its size
        canvases = header.size[0] * header.size[1] * _WEBP_PIXEL
        resizing = _resizing(header.size, transform.first_size(*header.size), final)
        _check_room(canvases + resizing + _COPIES * len(data), room)
    image = _open(header, transform.max_pixels)
    full = image.size
    scans = check_scans(header.data, full[0] * full[1]) if name == "jpeg" else 0
    # The header of a JPEG tells how it is turned. Other formats tell it once pixels are loaded.
    method = turn(image) if name == "jpeg" else None
    target = transform.first_size(*_turned(full, method))
    if room is None:
        _check_target(target)
    stored = None if target is None else _turned(target, method)
    least = final or stored
    box = draft(image, least)
    if name != "webp":
        copies = (header.data is not data) + 2 * header.lacks_end
        needed = image_bytes(image, full, target, scans, len(data), final)
        _check_room(needed + header.memory + copies * len(data), room)
    if header.lacks_end:
        check_whole(data, image, least)
    rgb = _load_rgb(image, header)
    if name != "jpeg":
        method = turn(image)
    if rgb is not image:
        image.close()  # frees its pixels
    if box is not None:
        # The picture fills only the box: a width of 3001 becomes 375.125 pixels, stored as 376.
        if method is None:
            return _scaled(rgb, transform, stored, final, box=box), name, full
        first = _scaled(rgb, transform, stored, box=box)
        return _scaled(_upright(first.image(), method), transform, final), name, _turned(full, method)
    upright = _upright(rgb, method)
    return _resized(upright, transform), name, upright.size


def convert_image(image: Image.Image, transform: "ImageTransform") -> Pixels:
    """Returns a picture that was decoded already, upright, in RGB and resized as by ``read_image``. Raises
    ImageError if it is too large or empty, is closed, has a mode without a conversion to RGB, or cannot be
    loaded."""
    if 0 in image.size:
        raise zero_size()
    _check_size(image.size, transform.max_pixels)
    try:
        image.load()
    except DAMAGED as error:
        # The error's text says that a file is closed, or Pillow has pixels to read and no file.
        if "closed" in str(error) or (getattr(image, "tile", None) and getattr(image, "fp", None) is None):
            raise ImageError(
                "truncated", "the Pillow image or its file is closed; give an image that is open"
            ) from None
        raise damaged(image.format or "image") from None
    try:
        rgb = to_rgb(image, Header(image.format or "", b""))
    except DAMAGED:
        raise ImageError(
            "unsupported_format",
            f'a Pillow image of mode {image.mode} is not read; give image.convert("RGB")',
        ) from None
    upright = _upright(rgb, turn(image))
    _check_target(transform.first_size(*upright.size))
    return _resized(upright, transform)


def upright_size(image: Image.Image) -> Size:
    """Returns the (width, height) that a loaded Pillow image has upright."""
    return _turned(image.size, turn(image))


def _read_header(data: bytes) -> Header:
    """Recognises the format and reads its header. No codec sees the data."""
    if not data:
        raise ImageError("empty", f"the image is empty; {remedy()}")
    kind = kind_of(data)
    if kind is None or not kind.picture:
        raise not_a_picture(kind)
    if not is_readable(kind.label):
        raise unsupported(f"{kind.name} images")
    read = _HEADERS.get(kind.label)
    return Header(kind.label, data) if read is None else read(data)


def _check_size(size: Size, max_pixels: int, longest: int = LONGEST_SIDE) -> None:
    (width, height), why = size, ""
    if max(size) > longest:
        why = f"has a side of more than {longest}"
    if width * height > max_pixels:
        why = f"is over the limit of {max_pixels} pixels"
    if why:
        raise ImageError("too_large", f"an image of {width}×{height} pixels {why}; scale it down first")


def _check_target(target: Size | None) -> None:
    """Refuses a huge target, which a thin picture has if its shorter edge sets the size. Only used without
    ``room``."""
    if target is not None and target[0] * target[1] > _MOST_RESIZED:
        raise ImageError(
            "too_large",
            f"an image as thin would be resized to {target[0]}×{target[1]}, over {_MOST_RESIZED} pixels; "
            "cut a part out of it first",
        )


def _check_room(needed: int, room: int | None) -> None:
    if room is not None and needed > room:
        raise NeedsMemory(needed)


def _open(header: Header, max_pixels: int) -> Image.Image:
    """Opens a picture and checks its size. Decodes no pixel."""
    name = header.format
    try:
        image = opened(ended(header.data, _NOISE) if header.lacks_end else header.data, name)
    except _BOMB:
        raise _over_pillows_limit(max_pixels) from None
    except DAMAGED:
        if name in ("bmp", "tiff"):  # the header is whole, so Pillow lacks this variant
            raise unsupported(f"{name.upper()} images {header.variant}") from None
        for sides in _EXTENTS.findall(header.data[:_AVIF_HEAD] if name == "avif" else b""):
            width, height = map(int.from_bytes, sides)
            _check_size((width, height), min(max_pixels, _AVIF_PIXELS), _AVIF_SIDE)
        raise damaged(name) from None
    _check_size(image.size, max_pixels)
    return image


def _load_rgb(image: Image.Image, header: Header) -> Image.Image:
    try:
        if header.masks:
            _load_as_stored(image)
        image.load()
        return to_rgb(image, header)
    except _BOMB:
        raise _over_pillows_limit() from None
    except DAMAGED:
        raise damaged(header.format) from None


def _upright(image: Image.Image, method: Image.Transpose | None) -> Image.Image:
    return image if method is None else image.transpose(method)


def _resized(upright: Image.Image, transform: "ImageTransform") -> Pixels:
    return _scaled(upright, transform, transform.first_size(*upright.size), transform.second_size)


def _scaled(image: Image.Image, transform: "ImageTransform", *sizes: Size | None, box: Box | None = None) -> Pixels:
    """Resizes to each of the sizes that are not None in turn."""
    wanted = [size for size in sizes if size is not None]
    return resized(image, transform.resample, wanted, box, transform.resampler)


def _turned(size: Size, method: Image.Transpose | None) -> Size:
    """Returns the size of a picture after a transposition, or before it."""
    same = (None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.ROTATE_180)
    return size if method in same else (size[1], size[0])


def _over_pillows_limit(max_pixels: int = sys.maxsize) -> ImageError:
    most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    limit = (
        f"the limit of {max_pixels}" if max_pixels <= most else f"Pillow's limit (twice MAX_IMAGE_PIXELS) of {most}"
    )
    return ImageError("too_large", f"an image is over {limit} pixels; scale it down first")


# Bytes for a pixel of a WEBP, 4 for each of four pictures: two canvases of the decoder of animations, through
# which Pillow reads every WEBP, the copy that the decoder returns, and the picture. Pictures made later take the
# place of the last two.
_WEBP_PIXEL = 16
# Bytes for a pixel of the stored picture, and of the picture in RGB or turned: at most 4 each.
_PIXEL = 8
# Bytes for a pixel in decoders of video codecs, beside the above: planes of up to 16 bits of the picture and its
# transparency, in each layout in which they are held, and the bytes that the decoder returns.
_CODEC_PIXEL = {"AVIF": 32, "HEIF": 32}
_COEFFICIENTS = 128  # bytes of a block of 8 × 8 coefficients, 2 each
# Number of copies of the file's bytes: the file itself, and copies that a codec makes.
_COPIES = 3
_TABLES = 48  # bytes of the tables of Pillow's resize for each row and column


def image_bytes(
    image: Image.Image, full: Size, target: Size | None, scans: int, length: int, final: Size | None
) -> int:
    """Returns the peak memory, in bytes, for decoding and resizing a picture.

    Args:
        image: opened, and drafted if it will be.
        full: (width, height) before the draft.
        target: (width, height) of the first resize; ``None`` without one.
        scans: number of the JPEG's scans.
        length: bytes of the file.
        final: (width, height) of the second resize; ``None`` without one.
    """
    pixels = image.size[0] * image.size[1]
    peak = pixels * _CODEC_PIXEL.get(image.format or "", _PIXEL)
    if isinstance(image, JpegImagePlugin.JpegImageFile) and (scans > 1 or "progressive" in image.info):
        peak = max(peak, pixels * 4 + _coefficients(image, full))
    return peak + _resizing(image.size, target, final) + _COPIES * length


def _coefficients(image: JpegImagePlugin.JpegImageFile, full: Size) -> int:
    """Returns the bytes of a JPEG's coefficients. libjpeg keeps all of them if they come in several scans."""
    across = max((each[1] for each in image.layer), default=1) or 1
    down = max((each[2] for each in image.layer), default=1) or 1
    units = -(-full[0] // (8 * across)) * -(-full[1] // (8 * down))
    return units * sum(each[1] * each[2] for each in image.layer) * _COEFFICIENTS


def _resizing(size: Size, target: Size | None, final: Size | None = None) -> int:
    """Returns the bytes of a resize, and of a second one, when the picture before the first may still be held.

    Pillow resizes across and then down, so the picture between has the new width and the old height. Before the
    picture is loaded and turned, either side may be the width.
    """
    if target is None:
        return 0
    once = 4 * (max(target) * max(size) + 3 * target[0] * target[1]) + _TABLES * sum(size)
    return once + _resizing(target, final)


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


def lift_pillows_limit() -> None:
    """Leaves the greatest number of pixels to ``max_pixels``. Pillow's own limit holds for all of a process, so
    only a process of ours may lift it."""
    Image.MAX_IMAGE_PIXELS = None


def load_codecs() -> None:
    """Imports everything that decoding a picture may import, for processes that cannot open files later."""
    lift_pillows_limit()
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
    plugin: Any = import_module(_RARE[name]) if name in _RARE else None
    if name == "heic":
        heif: Image.Image = plugin.HeifImageFile(io.BytesIO(data))
        return heif
    if name == "tiff":
        plugin.OPEN_INFO.update(LAYOUTS)
    image = Image.open(io.BytesIO(data), formats=(name.upper(),))
    if name == "tiff":
        mend_tiles(image, plugin)
    return image


def draft(image: Image.Image, least: Size | None) -> Box | None:
    """Lets a large JPEG be decoded at a fraction of its size, if it is resized to ``least``. Returns the part of
    the result that the picture fills."""
    if least is None or not isinstance(image, JpegImagePlugin.JpegImageFile):
        return None
    full = image.size
    drafted = image.draft(None, (2 * least[0], 2 * least[1]))
    return drafted[1] if drafted and image.size != full else None


def check_whole(data: bytes, image: Image.Image, least: Size | None) -> None:
    """Refuses a JPEG that lacks more than its end marker.

    A decoder makes up missing data from the bytes that follow. So the picture is decoded twice, with different
    noise behind its data: only a complete picture comes out the same. Raises ImageError for any other.
    """
    if not covers_all(data):
        raise damaged("jpeg")
    try:
        with opened(ended(data, _OTHER_NOISE), "jpeg") as other:
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


# Pixels of a strip that is converted at a time.
_STRIP = 1 << 18
_OPAQUE = (255, 255)


def to_rgb(image: Image.Image, header: Header) -> Image.Image:
    """Returns a loaded image in RGB, as its file's header says, or the same object if it is opaque RGB already.
    Raises ValueError if Pillow does not convert its mode."""
    key, frame = header.key, header.frame  # a grey image with a key holds all 16 bits
    if image.mode == "RGB" and not (image.has_transparency_data or key or frame):
        return image
    low = lower_halves(header) if key and len(key) > 1 else None
    whole = Image.new("RGB", image.size, "white")
    left, top, right, bottom = frame or (0, 0, *image.size)
    rows = max(_STRIP // image.width, 1)
    boxes = [(left, start, right, min(start + rows, bottom)) for start in range(top, bottom, rows)]
    # Programs without an alpha channel leave its bytes at 0.
    if header.masks:
        opaque = all(_channel(_planes(image.crop(box)), header.masks[3]).getextrema() == (0, 0) for box in boxes)
    else:
        opaque = image.format in ("BMP", "TIFF") and image.mode == "RGBA" and image.getextrema()[3:] == ((0, 0),)
    scale = _scale(image, map(image.crop, boxes))
    extremes: Any = image.getextrema() if header.unsigned and image.mode == "I" else (0, 0)
    wrapped = extremes[0] < 0
    for box in boxes:
        strip = image.crop(box)
        if header.masks:
            strip = Image.merge("RGBA", [_channel(_planes(strip), mask) for mask in header.masks])
        strip = strip.convert("RGBX") if opaque else strip
        if wrapped:  # the highest byte of each number
            strip = Image.frombytes("L", strip.size, strip.tobytes()[3 if sys.byteorder == "little" else 0 :: 4])
        rgb = _rgb(strip, *scale)
        if header.inverted:
            rgb = ImageChops.invert(rgb)
        if key:
            rgb.paste("white", mask=_equal(strip, key, low.crop(box) if low else None))
        whole.paste(rgb, box)
    return whole


def _load_as_stored(image: Any) -> None:
    """Lets Pillow load the bytes of a BMP's pixels of 16 or 32 bits as they lie in the file."""
    mode = "I;16" if image.tile[0].args[0] == "BGR;15" else "RGBA"
    image.tile = [tile._replace(args=(mode, *tile.args[1:])) for tile in image.tile]
    image._mode = mode


def _planes(stored: Image.Image) -> Sequence[Image.Image]:
    """Returns an image for each byte of the stored pixels, the lowest byte first."""
    return stored.split() if stored.mode == "RGBA" else _halves(stored)[::-1]


def _channel(planes: Sequence[Image.Image], mask: int) -> Image.Image:
    """Returns the colour that a mask cuts out of pixels, scaled to 8 bits. A mask of no bits is black."""
    bits = min(mask.bit_count(), 8)
    shift = mask.bit_length() - bits
    channel, most = Image.new("L", planes[0].size), max((1 << bits) - 1, 1)
    for number, plane in enumerate(planes):
        part = mask & most << shift & 255 << 8 * number
        if part:  # parts of different bytes have no bits in common
            table = [(byte << 8 * number & part) >> shift for byte in range(256)]
            channel = ImageChops.add(channel, plane.point(table))
    return channel.point([(min(value, most) * 255 + most // 2) // most for value in range(256)])


def _rgb(image: Image.Image, factor: float, offset: float) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow's own conversion clips 16 bits to 255 instead of scaling
        upper, lower = _halves(image)
        if factor > 1:
            upper = upper.point([min(round(byte * factor), 255) for byte in range(256)])
            upper = ImageChops.add(upper, lower.point([int(byte * factor) >> 8 for byte in range(256)]))
        return upper.convert("RGB")
    if image.mode in ("I", "F"):
        return image.point(lambda value: value * factor + offset).convert("L").convert("RGB")
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


def _scale(image: Image.Image, strips: Iterable[Image.Image]) -> tuple[float, float]:
    """Returns the factor and the offset that bring the numbers of a picture of 32 bits a pixel to 0 to 255.

    The largest number decides which value is white: up to 1 for floats it is 1, up to 255 it is 255, up to 65535
    for integers it is 65535. Above these limits it is the largest number itself. If numbers lie on both sides of 0,
    the least is black.

    Numbers of 16 bits have a factor if no number of a TIFF has more than 12: Pillow reads 12 bits so, and programs
    of microscopes and scanners write them so. ``strips``: the image in parts.
    """
    if image.mode.startswith("I;16") and image.format == "TIFF":
        most = max(_largest(strip) for strip in strips)
        return (float(1 << 16 - max(most.bit_length(), 8)) if most < 1 << 12 else 1.0), 0.0
    if image.mode not in ("I", "F"):
        return 1.0, 0.0
    extremes: Any = image.getextrema()
    least, largest = float(extremes[0]), float(extremes[1])
    if not math.isfinite(largest):
        return 1.0, 0.0
    if -1.1 * largest <= least < 0:  # a number far below 0 marks pixels without one
        factor = 255 / (largest - least)
        return factor, -least * factor
    if largest <= 255:
        return 255.0 if largest <= 1 and image.mode == "F" else 1.0, 0.0
    return (1 / 256 if image.mode == "I" and largest <= 65535 else 255 / largest), 0.0


def _largest(image: Image.Image) -> int:
    """Returns the largest number of an image of 16 bits, or one that has as many bits."""
    extremes: list[Any] = [half.getextrema() for half in _halves(image)]
    (_, upper), (_, lower) = extremes
    return int(upper) << 8 | (0 if upper else int(lower))


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
