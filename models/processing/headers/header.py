"""Defines the facts about a picture that are known before a codec sees it, and errors that all formats share."""

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image_error import ImageError
from snapcap.models.processing.image_formats import Kind, readable

# Pillow takes 2 to 4 µs and 150 bytes for each segment, chunk or strip. 20 MiB of PNG in chunks of 8 KiB are
# 2,560.
MOST_PARTS = 65_536
LONGEST_SIDE = 65_535  # greatest side of any JPEG; the tables of Pillow's resize grow with the sides of a PNG


@dataclass(frozen=True)
class Header:
    """The header of a picture's file.

    format: ``jpeg``, ``png`` and so on.
    data: the data for the codec: the file without the parts that no codec needs.
    size: (width, height) as stored. None if the codec's own reader tells it without decoding.
    memory: bytes that the codec takes beside the pixels and the file.
    scans: the number of a JPEG's scans.
    lacks_end: a JPEG has no end marker.
    key: the 16-bit sample values of the one transparent colour, if Pillow does not compare them.
    frame: (left, top, right, bottom) of the first frame, if it does not cover the whole picture.
    inverted: 0 is white, where Pillow takes it for black.
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
    """Returns the error of a file that no decoder can read to its end."""
    return ImageError("truncated", f"the {name.upper()} data is incomplete or damaged; send the whole file")


def too_complex(name: str, what: str, remedy: str = "save it anew, without them") -> ImageError:
    """Returns the error of a file whose parts cost more than its pixels."""
    return ImageError("too_complex", f"the {name} has {what}, which takes too long to decode; {remedy}")


def zero_size() -> ImageError:
    """Returns the error of a picture without pixels."""
    return ImageError("zero_size", "the image is 0 pixels wide or high; send one with at least one pixel")


def unsupported(what: str) -> ImageError:
    """Returns the error of a format or variant that is not read, such as ``what`` = "JPEG XL images"."""
    return ImageError("unsupported_format", f"{what} are not read; {remedy()}")


def not_a_picture(kind: Kind | None) -> ImageError:
    """Returns the error of data that no program shows as a picture."""
    what = f"{kind.name}, not an image" if kind else "not an image"
    return ImageError("not_an_image", f"the data is {what}; {remedy()}")


def remedy() -> str:
    """Returns advice to send one of the formats that are read."""
    return f"send {readable()}"
