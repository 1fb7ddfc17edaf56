"""Estimates the bytes that decoding an image takes from its header; a pixel's cost depends on the format.

An estimate is never below the actual memory: tests decode each format and mode in a fresh process and compare.
"""

from PIL import Image, JpegImagePlugin

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


def webp_bytes(
    size: tuple[int, int], target: tuple[int, int] | None, length: int, final: tuple[int, int] | None = None
) -> int:
    """Returns `image_bytes` of a WEBP that is not open yet, because opening it makes the canvases."""
    return size[0] * size[1] * _WEBP_PIXEL + _resizing(size, target) + _again(target, final) + _COPIES * length


def image_bytes(
    image: Image.Image,
    full: tuple[int, int],
    target: tuple[int, int] | None,
    scans: int,
    length: int,
    final: tuple[int, int] | None = None,
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
    return peak + _resizing(image.size, target) + _again(target, final) + _COPIES * length


def _coefficients(image: JpegImagePlugin.JpegImageFile, full: tuple[int, int]) -> int:
    """Returns the bytes of a JPEG's coefficients. libjpeg keeps all of them if they come in several scans."""
    across = max((each[1] for each in image.layer), default=1) or 1
    down = max((each[2] for each in image.layer), default=1) or 1
    units = -(-full[0] // (8 * across)) * -(-full[1] // (8 * down))
    return units * sum(each[1] * each[2] for each in image.layer) * _COEFFICIENTS


def _again(target: tuple[int, int] | None, final: tuple[int, int] | None) -> int:
    """Returns the bytes of a second resize. The picture before the first resize may still be held then."""
    return 0 if target is None else _resizing(target, final)


def _resizing(size: tuple[int, int], target: tuple[int, int] | None) -> int:
    """Returns the bytes of a resize.

    Pillow resizes across and then down, so the picture between has the new width and the old height. Before the
    picture is loaded and turned, either side may be the width.
    """
    if target is None:
        return 0
    return 4 * (max(target) * max(size) + 3 * target[0] * target[1]) + _TABLES * sum(size)
