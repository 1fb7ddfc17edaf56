"""Decodes the bytes of an image into upright RGB, and tells apart every way they can be bad.

Only JPEG, PNG and WEBP are read, and of an animation the first frame. The size, the memory that it takes and the
parts of the file are checked before a pixel is decoded: 236 KB of PNG can hold 300 MB.
"""

import io
import struct
import sys
import zlib
from collections.abc import Callable

from PIL import Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError, WebPImagePlugin

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image_error import ImageError, NeedsMemory
from snapcap.models.processing.image_memory import image_bytes, webp_bytes
from snapcap.models.processing.image_parts import LONGEST_SIDE, check_parts, check_scans, sniff, webp_size

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


# Rows of so many pixels are brought to RGB at a time, so that what that takes is not taken for a whole picture.
_STRIP = 1 << 18
_MOST_RESIZED = 50_000_000  # pixels: 150 MB in RGB


@dataclass(frozen=True)
class Resize:
    """``target``: (width, height) of the upright picture -> (width, height) that is wanted. ``filter``: Pillow's
    number. ``final``: the (width, height) to which it is resized once more, if it is."""

    target: Callable[[int, int], tuple[int, int]]
    filter: int
    final: tuple[int, int] | None = None


def read_image(
    data: bytes, max_pixels: int, resize: Resize | None, room: int | None = None
) -> tuple[Image.Image, str]:
    """Decode a picture into upright RGB, of the size that is wanted.

    A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size, to no less than twice the size that is wanted
    (Pillow's ``draft``): libjpeg then averages blocks in the frequency domain, three times faster for a photo
    from a camera. The mean difference to a full decode is below half of one of 255 steps, at most 5 of them
    inside the picture and more in the last row or column, which may hold a part of a block.

    Transparent pixels are laid on white. transformers drops the alpha channel, which shows whatever colour
    was left under it, mostly black: what no viewer of the picture sees. Opaque pictures come out as there.
    Of 16-bit greys the high byte is kept, as Pillow does for 16-bit colours; in transformers all above 255
    are white.

    Args:
        room: how many bytes of memory it may take at most; None: as many as it does.

    Returns:
        The picture, and its format, one of ``jpeg``, ``png`` and ``webp``.

    Raises:
        ImageError: every reason but ``wrong_size``.
        NeedsMemory: more than ``room``.
    """
    _check_webp(data, max_pixels, resize, room)
    image, name = _open(data, max_pixels)
    full = image.size
    scans = check_scans(data, full[0] * full[1]) if name == "jpeg" else 0
    # Of a JPEG it is known from the header how it is turned, of others once pixels are loaded.
    method = _turn(image) if name == "jpeg" else None
    target = None if resize is None else resize.target(*_swapped(full, _swaps_sides(method)))
    if target is not None and room is None:
        _check_target(target)
    stored = None if target is None else _swapped(target, _swaps_sides(method))
    box = None
    if stored is not None and isinstance(image, JpegImagePlugin.JpegImageFile):
        least = (resize and resize.final) or stored
        drafted = image.draft(None, (2 * least[0], 2 * least[1]))
        box = drafted[1] if drafted and image.size != full else None
    final = None if resize is None else resize.final
    _check_room(image_bytes(image, full, target, scans, len(data), final) if name != "webp" else 0, room)
    rgb = _load_rgb(image, name)
    if name != "jpeg":
        method = _turn(image)
    if rgb is not image:
        image.close()  # its pixels are not needed any more
    if box is not None and resize is not None and stored is not None:
        # The picture fills only the box: a width of 3001 becomes 375.125 pixels, stored as 376.
        resized = rgb.resize(stored, Image.Resampling(resize.filter), box=box)
        return _finished(_upright(resized, method), resize), name
    return _resized(_upright(rgb, method), resize), name


def convert_image(image: Image.Image, max_pixels: int, resize: Resize | None) -> Image.Image:
    """A picture that somebody has decoded, upright, in RGB and of the size that is wanted, as of ``read_image``.

    Raises:
        ImageError: it is too large or empty, or was opened and cannot be loaded.
    """
    if 0 in image.size:
        raise ImageError("zero_size", "the image is 0 pixels wide or high; send one with at least one pixel")
    _check_size(image.size, max_pixels)
    upright = _upright(_load_rgb(image, image.format or "image"), _turn(image))
    if resize is not None:
        _check_target(resize.target(*upright.size))
    return _resized(upright, resize)


def _open(data: bytes, max_pixels: int) -> tuple[Image.Image, str]:
    """Read the header of a picture and check its size; no pixel is decoded."""
    if not data:
        raise ImageError("empty", f"the image is empty; {_READ}")
    check_parts(data)
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large("", max_pixels) from None
    except UnidentifiedImageError:
        raise _unidentified(data) from None
    except _DAMAGED:
        raise _damaged(sniff(data)) from None
    _check_size(image.size, max_pixels)
    return image, _FORMATS[image.format or ""]


def _check_webp(data: bytes, max_pixels: int, resize: Resize | None, room: int | None) -> None:
    """Before it is opened, which already makes a canvas of its size."""
    size = webp_size(data) if sniff(data) == "webp" else None
    if size is not None and 0 not in size:
        _check_size(size, max_pixels)
        target, final = (None, None) if resize is None else (resize.target(*size), resize.final)
        _check_room(webp_bytes(size, target, len(data), final), room)


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise _too_large(f" of {width}×{height} pixels", max_pixels)
    if max(size) > LONGEST_SIDE:
        raise ImageError(
            "too_large",
            f"an image of {width}×{height} pixels has a side of more than {LONGEST_SIDE}; scale it down first",
        )


def _check_target(target: tuple[int, int]) -> None:
    """Of a thin picture whose shorter edge decides it may be huge, where nobody has said how much room there is."""
    if target[0] * target[1] > _MOST_RESIZED:
        raise ImageError(
            "too_large",
            f"an image as thin would be resized to {target[0]}×{target[1]}, over {_MOST_RESIZED} pixels; "
            "cut a part out of it first",
        )


def _check_room(needed: int, room: int | None) -> None:
    if room is not None and needed > room:
        raise NeedsMemory(needed)


def _load_rgb(image: Image.Image, name: str) -> Image.Image:
    try:
        image.load()
        return _in_strips(image)
    except _DAMAGED:
        raise _damaged(name) from None


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What brings an image upright."""
    try:
        return _UPRIGHT.get(image.getexif().get(_ORIENTATION_TAG, 1))
    except _DAMAGED:  # of the EXIF block; the pixels may be good
        return None


def _upright(image: Image.Image, method: Image.Transpose | None) -> Image.Image:
    return image if method is None else image.transpose(method)


def _resized(upright: Image.Image, resize: Resize | None) -> Image.Image:
    target = upright.size if resize is None else resize.target(*upright.size)
    if resize is None:
        return upright
    if upright.size != target:
        upright = upright.resize(target, Image.Resampling(resize.filter))
    return _finished(upright, resize)


def _finished(image: Image.Image, resize: Resize) -> Image.Image:
    """After a second resize, if there is one."""
    if resize.final is None or image.size == resize.final:
        return image
    return image.resize(resize.final, Image.Resampling(resize.filter))


def _swaps_sides(method: Image.Transpose | None) -> bool:
    return method is not None and method not in (
        Image.Transpose.FLIP_LEFT_RIGHT,
        Image.Transpose.FLIP_TOP_BOTTOM,
        Image.Transpose.ROTATE_180,
    )


def _swapped(size: tuple[int, int], swap: bool) -> tuple[int, int]:
    return (size[1], size[0]) if swap else size


def _in_strips(image: Image.Image) -> Image.Image:
    """The image in RGB; as it is where it is that already."""
    rows = max(_STRIP // image.width, 1)
    if image.height <= rows or (image.mode == "RGB" and not image.has_transparency_data):
        return _rgb(image)
    whole = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        whole.paste(_rgb(image.crop(box)), box)
    return whole


def _high_bytes(image: Image.Image) -> Image.Image:
    """The upper half of 16 bits: in modes I;16 and I;16B, and in I, where they are the lower half of 32."""
    size = 4 if image.mode == "I" else 2
    big = image.mode == "I;16B" or (image.mode == "I" and sys.byteorder == "big")
    data = image.tobytes()
    return Image.frombytes("L", image.size, data[size - 2 if big else 1 :: size])


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow's own conversion clips 16 bits to 255 instead of scaling
        return _high_bytes(image).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy what is RGB
    rgba = image.convert("RGBA")
    alpha = rgba.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return rgba.convert("RGB")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=alpha)
    return white


def _unidentified(data: bytes) -> ImageError:
    name = sniff(data)
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
