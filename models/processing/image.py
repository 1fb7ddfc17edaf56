"""Decodes the bytes of an image into upright RGB, with a separate error for every way they can be bad.

Only the first picture of an animation or of several pages is read. The size, the memory for decoding and the parts
of the file are checked before a pixel is decoded: 236 KB of PNG can hold 300 MB.
"""

from collections.abc import Callable

from PIL import Image

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.codecs import DAMAGED, check_whole, draft, lower_halves, opened, turn, unended
from snapcap.models.processing.headers.bmp import read_bmp
from snapcap.models.processing.headers.gif import read_gif
from snapcap.models.processing.headers.header import (
    LONGEST_SIDE,
    Header,
    damaged,
    not_a_picture,
    remedy,
    unsupported,
    zero_size,
)
from snapcap.models.processing.headers.jpeg import check_scans, read_jpeg
from snapcap.models.processing.headers.png import read_png
from snapcap.models.processing.headers.tiff import read_tiff
from snapcap.models.processing.headers.webp import read_webp
from snapcap.models.processing.image_error import ImageError, NeedsMemory
from snapcap.models.processing.image_formats import is_readable, kind_of
from snapcap.models.processing.image_memory import image_bytes, webp_bytes
from snapcap.models.processing.rgb import to_rgb

_HEADERS: dict[str, Callable[[bytes], Header]] = {
    "jpeg": read_jpeg,
    "png": read_png,
    "webp": read_webp,
    "gif": read_gif,
    "bmp": read_bmp,
    "tiff": read_tiff,
}

_MOST_RESIZED = 50_000_000  # pixels; 150 MB in RGB


@dataclass(frozen=True)
class Resize:
    """How a picture is resized.

    target: maps (width, height) of the upright picture to the (width, height) after the first resize.
    filter: Pillow's number of the filter.
    final: (width, height) of a second resize, if any.
    """

    target: Callable[[int, int], tuple[int, int]]
    filter: int
    final: tuple[int, int] | None = None


def read_image(
    data: bytes, max_pixels: int, resize: Resize | None, room: int | None = None
) -> tuple[Image.Image, str]:
    """Decodes a picture into upright RGB, and resizes it.

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
        The picture, and its format, one of ``READ``.

    Raises:
        ImageError: with any reason except ``wrong_size``.
        NeedsMemory: decoding takes more than ``room``.
    """
    header = _read_header(data)
    if header.size is not None:
        _check_size(header.size, max_pixels)
    name = header.format
    final = None if resize is None else resize.final
    if name == "webp" and header.size is not None:  # opening it makes a canvas of its size
        wanted = None if resize is None else resize.target(*header.size)
        _check_room(webp_bytes(header.size, wanted, len(data), final), room)
    image = _open(header, max_pixels)
    full = image.size
    scans = check_scans(header.data, full[0] * full[1]) if name == "jpeg" else 0
    # The header of a JPEG tells how it is turned. Other formats tell it once pixels are loaded.
    method = turn(image) if name == "jpeg" else None
    target = None if resize is None else resize.target(*_swapped(full, _swaps_sides(method)))
    if target is not None and room is None:
        _check_target(target)
    stored = None if target is None else _swapped(target, _swaps_sides(method))
    box = None
    if stored is not None:
        box = draft(image, final or stored)
    if name != "webp":
        copies = (header.data is not data) + 2 * header.lacks_end
        needed = image_bytes(image, full, target, scans, len(data), final)
        _check_room(needed + header.memory + copies * len(data), room)
    if header.lacks_end:
        check_whole(data, image, None if stored is None else final or stored)
    rgb = _load_rgb(image, header)
    if name != "jpeg":
        method = turn(image)
    if rgb is not image:
        image.close()  # frees its pixels
    if box is not None and resize is not None and stored is not None:
        # The picture fills only the box: a width of 3001 becomes 375.125 pixels, stored as 376.
        resized = rgb.resize(stored, Image.Resampling(resize.filter), box=box)
        return _finished(_upright(resized, method), resize), name
    return _resized(_upright(rgb, method), resize), name


def convert_image(image: Image.Image, max_pixels: int, resize: Resize | None) -> Image.Image:
    """Returns a picture that was decoded already, upright, in RGB and resized as by ``read_image``.

    Raises:
        ImageError: it is too large or empty, is closed, has a mode without a conversion to RGB, or cannot be
            loaded.
    """
    if 0 in image.size:
        raise zero_size()
    _check_size(image.size, max_pixels)
    try:
        image.load()
    except DAMAGED as error:
        if _is_closed(image, error):
            raise ImageError(
                "truncated", "the Pillow image or its file is closed; give an image that is open"
            ) from None
        raise damaged(image.format or "image") from None
    try:
        rgb = to_rgb(image)
    except DAMAGED:
        raise ImageError(
            "unsupported_format",
            f'a Pillow image of mode {image.mode} is not read; give image.convert("RGB")',
        ) from None
    upright = _upright(rgb, turn(image))
    if resize is not None:
        _check_target(resize.target(*upright.size))
    return _resized(upright, resize)


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
    """Refuses a huge target, which a thin picture has if its shorter edge sets the size. Only used without
    ``room``."""
    if target[0] * target[1] > _MOST_RESIZED:
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
        image = opened(unended(header.data) if header.lacks_end else header.data, name)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large("", max_pixels) from None
    except DAMAGED:
        if name in ("bmp", "tiff"):  # the header is whole, so Pillow lacks this variant
            raise unsupported(f"{name.upper()} images of this kind") from None
        raise damaged(name) from None
    _check_size(image.size, max_pixels)
    return image


def _load_rgb(image: Image.Image, header: Header) -> Image.Image:
    try:
        image.load()
        low = lower_halves(header) if header.key and len(header.key) > 1 else None
        return to_rgb(image, header.key, low, header.frame, header.inverted)
    except DAMAGED:
        raise damaged(header.format) from None


def _is_closed(image: Image.Image, error: BaseException) -> bool:
    """Returns whether loading failed because the image is closed: Pillow says so, or has pixels to read and no
    file."""
    return "closed" in str(error) or bool(getattr(image, "tile", None) and getattr(image, "fp", None) is None)


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
    """Returns the image after a second resize, if there is one."""
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


def _too_large(what: str, max_pixels: int) -> ImageError:
    return ImageError("too_large", f"an image{what} is over the limit of {max_pixels} pixels; scale it down first")
