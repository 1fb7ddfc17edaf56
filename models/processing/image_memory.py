"""Estimates from an image's header the bytes that it takes to decode, where a pixel's cost depends on the format.

Never less than it takes: tests decode each format and mode in a fresh process and compare.
"""

from PIL import Image, JpegImagePlugin

# Two canvases of the decoder of animations, through which Pillow reads every WEBP, the copy that it hands over, and
# the picture: each 4 bytes. When the last two are gone, what is made of the picture takes their place.
_WEBP_PIXEL = 16
# The picture as it was stored, and in RGB or turned: each 4 bytes at most.
_PIXEL = 8
# And what the decoders of videos' codecs hold: planes of up to 16 bits, of the picture and of its transparency, for
# each way in which they are laid out, and the bytes that they hand over.
_CODEC_PIXEL = {"AVIF": 32, "HEIF": 32}
_COEFFICIENTS = 128  # a block of 8 × 8, 2 bytes each
# The bytes of the file: as they came, and copies that a codec makes.
_COPIES = 3
_TABLES = 48  # of Pillow's resize, for each row and column


def webp_bytes(
    size: tuple[int, int], target: tuple[int, int] | None, length: int, final: tuple[int, int] | None = None
) -> int:
    """As `image_bytes`, of a WEBP that is not open yet: to open it makes the canvases."""
    return size[0] * size[1] * _WEBP_PIXEL + _resizing(size, target) + _again(target, final) + _COPIES * length


def image_bytes(
    image: Image.Image,
    full: tuple[int, int],
    target: tuple[int, int] | None,
    scans: int,
    length: int,
    final: tuple[int, int] | None = None,
) -> int:
    """What it takes at its peak to decode a picture and to resize it.

    Args:
        image: opened, and drafted where it will be.
        full: (width, height) before it was drafted.
        target: (width, height) to which it is resized; ``None`` where it is not.
        scans: of the JPEG.
        length: of the file, in bytes.
        final: (width, height) to which it is resized once more; ``None`` where it is not.
    """
    pixels = image.size[0] * image.size[1]
    peak = pixels * _CODEC_PIXEL.get(image.format or "", _PIXEL)
    if isinstance(image, JpegImagePlugin.JpegImageFile) and (scans > 1 or "progressive" in image.info):
        peak = max(peak, pixels * 4 + _coefficients(image, full))
    return peak + _resizing(image.size, target) + _again(target, final) + _COPIES * length


def _coefficients(image: JpegImagePlugin.JpegImageFile, full: tuple[int, int]) -> int:
    """libjpeg keeps those of the whole picture when they come in more than one scan."""
    across = max((each[1] for each in image.layer), default=1) or 1
    down = max((each[2] for each in image.layer), default=1) or 1
    units = -(-full[0] // (8 * across)) * -(-full[1] // (8 * down))
    return units * sum(each[1] * each[2] for each in image.layer) * _COEFFICIENTS


def _again(target: tuple[int, int] | None, final: tuple[int, int] | None) -> int:
    """Of a second resize, while the picture before the first may still be there."""
    return 0 if target is None else _resizing(target, final)


def _resizing(size: tuple[int, int], target: tuple[int, int] | None) -> int:
    """Pillow resizes across and then down: what is between has the new width and the old height. Which of the two
    sides is across may be known only when the picture is loaded and turned."""
    if target is None:
        return 0
    return 4 * (max(target) * max(size) + 3 * target[0] * target[1]) + _TABLES * sum(size)
