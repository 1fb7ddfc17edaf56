"""Defines what is known of a picture before a codec sees it, and the errors that all formats share."""

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image_error import ImageError
from snapcap.models.processing.image_formats import Kind, readable

# Pillow takes 2 to 4 µs and 150 bytes for each segment, chunk or strip. 20 MiB of PNG in chunks of 8 KiB are 2,560.
MOST_PARTS = 65_536
LONGEST_SIDE = 65_535  # of any JPEG; a longer one, of a PNG, makes tables of Pillow's resize as long


@dataclass(frozen=True)
class Header:
    """The head of a picture's file.

    format: ``jpeg``, ``png`` and so on.
    data: what the codec is given: the file without the parts that it does not need.
    size: (width, height) as it is stored; None where the codec's own reader tells it without decoding.
    memory: bytes that the codec takes beside the pixels and the file.
    scans: of a JPEG.
    lacks_end: whether a JPEG has no end marker.
    key: the sample values of the one transparent colour, of 16 bits each, which Pillow does not compare.
    frame: (left, top, right, bottom) of the part of a picture that its first frame covers, where that is not all.
    inverted: whether 0 is white, where Pillow takes it for black.
    """

    format: str
    data: bytes
    size: tuple[int, int] | None = None
    memory: int = 0
    scans: int = 1
    lacks_end: bool = False
    key: tuple[int, ...] | None = None
    frame: tuple[int, int, int, int] | None = None
    inverted: bool = False


def damaged(name: str) -> ImageError:
    """The error of a file that no decoder can read to its end."""
    return ImageError("truncated", f"the {name.upper()} data is incomplete or damaged; send the whole file")


def too_complex(name: str, what: str, remedy: str = "save it anew, without them") -> ImageError:
    """The error of a file whose parts cost more than its pixels."""
    return ImageError("too_complex", f"the {name} has {what}, which takes too long to decode; {remedy}")


def zero_size() -> ImageError:
    """The error of a picture without pixels."""
    return ImageError("zero_size", "the image is 0 pixels wide or high; send one with at least one pixel")


def unsupported(what: str) -> ImageError:
    """The error of a format, or a variant of one, that is not read. ``what``: as in "JPEG XL images"."""
    return ImageError("unsupported_format", f"{what} are not read; {remedy()}")


def not_a_picture(kind: Kind | None) -> ImageError:
    """The error of data that no program shows as a picture."""
    what = f"{kind.name}, not an image" if kind else "not an image"
    return ImageError("not_an_image", f"the data is {what}; {remedy()}")


def remedy() -> str:
    """The formats to send instead."""
    return f"send {readable()}"
