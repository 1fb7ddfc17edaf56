"""Counts the parts of an image's file, before a codec sees it.

What a file costs is not told by its pixels alone. Each scan of a progressive JPEG walks all coefficients again, for
26 bytes of the file; each segment or chunk is an object of Pillow's, for 4 or 12; a compressed text may be a
thousand times its length. Files that cameras and programs write have few of each.
"""

import re
import struct

from snapcap.models.processing.image_error import ImageError

# Encoders write 10 scans (libjpeg), up to 17 (mozjpeg), and 26 for four components.
MOST_SCANS = 100
# A scan takes 0.5 to 1.5 ms for a million flat pixels: this is a second or two, or 20 scans of 50 million pixels.
MOST_SCANNED = 1_000_000_000
# Pillow takes 2 to 4 µs and 150 bytes for each. A PNG of 20 MiB in chunks of 8 KiB has 2,560.
MOST_PARTS = 65_536
# Each may become a mebibyte of text, and that four of memory.
MOST_PACKED_TEXTS = 16
_MOST_JUNK = 65_536  # bytes between two segments, which Pillow steps over one at a time
LONGEST_SIDE = 65_535  # of any JPEG; a longer one, of a PNG, makes tables of Pillow's resize as long

_SOS, _EOI, _SOF = 0xDA, 0xD9, 0xC0
# In a scan 0xFF stands before 0 for itself, and before D0 to D7 for a restart; before 0xFF it is padding.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_CHUNK = struct.Struct(">I4s")
_RIFF_CHUNK = struct.Struct("<4sI")
_LENGTH = struct.Struct(">H")
_PACKED_TEXTS = (b"zTXt", b"iTXt", b"iCCP")


def sniff(data: bytes) -> str:
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


def check_parts(data: bytes) -> None:
    """Refuse a file that has too many parts to be a picture of this format; of other formats nothing is known.

    Raises:
        ImageError: ``too_complex``.
    """
    if data.startswith(b"\xff\xd8"):
        _walk(data, 1)
    elif data.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_png(data)
    elif data.startswith(b"RIFF"):
        _check_riff(data)


def check_scans(data: bytes, pixels: int) -> int:
    """How many scans a JPEG of so many pixels has.

    Raises:
        ImageError: ``too_complex``, there are more than can be decoded in a time that fits.
    """
    most = min(MOST_SCANS, MOST_SCANNED // max(pixels, 1))
    # Never fewer than there are: only in what a segment holds, as a preview, may these bytes be something else.
    if data.count(b"\xff\xda") <= 1:
        return 1
    scans = _walk(data, most + 1)
    if scans > most:
        raise _too_complex(
            "JPEG", f"more than {most} scans at this size", "save it with fewer, or as baseline JPEG"
        )
    return scans


def webp_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a WEBP from its first chunk, and None where that is none of the three known ones."""
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X" and len(body) == 10:
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L" and len(body) >= 5 and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a" and len(body) == 10:
        width, height = struct.unpack_from("<HH", body, 6)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _walk(data: bytes, most: int) -> int:
    """How many scans a JPEG has; no further than to the last one of so many.

    What libjpeg may take for a marker is one here too, so that no scan of its can hide: only a segment that it
    steps over by its length is stepped over."""
    at, scans, parts = 2, 0, 0
    while (found := _MARKER.search(data, at)) is not None:
        if not scans and found.start() - at > _MOST_JUNK:
            raise ImageError("truncated", "the JPEG data is incomplete or damaged; send the whole file")
        at = found.end()
        marker = data[at - 1]
        if marker == _EOI:
            break
        if marker == _SOS:
            scans += 1
            if scans >= most:
                break
        parts += 1
        if parts > MOST_PARTS:
            raise _too_complex("JPEG", f"more than {MOST_PARTS} segments")
        if marker >= _SOF and marker != 0xD8 and at + 2 <= len(data):
            at += _LENGTH.unpack_from(data, at)[0]
    return scans


def _check_png(data: bytes) -> None:
    at, parts, packed = 8, 0, 0
    while at + 8 <= len(data):
        length, kind = _CHUNK.unpack_from(data, at)
        parts += 1
        packed += kind in _PACKED_TEXTS
        if parts > MOST_PARTS:
            raise _too_complex("PNG", f"more than {MOST_PARTS} chunks")
        if packed > MOST_PACKED_TEXTS:
            raise _too_complex("PNG", f"more than {MOST_PACKED_TEXTS} compressed texts")
        if kind == b"IEND":
            return
        at += 12 + length


def _check_riff(data: bytes) -> None:
    at, parts = 12, 0
    while at + 8 <= len(data):
        _, length = _RIFF_CHUNK.unpack_from(data, at)
        parts += 1
        if parts > MOST_PARTS:
            raise _too_complex("WEBP", f"more than {MOST_PARTS} chunks")
        at += 8 + length + (length & 1)


def _too_complex(name: str, what: str, remedy: str = "save it anew, without them") -> ImageError:
    return ImageError("too_complex", f"the {name} has {what}, which takes too long to decode; {remedy}")
