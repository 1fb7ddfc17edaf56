"""Counts the segments and scans of a JPEG, and removes segments that no decoder needs."""

import re
import struct

from snapcap.models.processing.headers.header import (
    MOST_PARTS,
    Header,
    damaged,
    too_complex,
    unsupported,
    zero_size,
)

# Encoders write 10 scans (libjpeg), up to 17 (mozjpeg), and 26 for four components.
MOST_SCANS = 100
# A scan of a million flat pixels takes 0.5 to 1.5 ms, so this limit is a second or two, or 20 scans of 50 million
# pixels.
MOST_SCANNED = 1_000_000_000
_MOST_JUNK = 65_536  # bytes between two segments; Pillow skips them one at a time

_SOS, _EOI, _SOF, _SOI = 0xDA, 0xD9, 0xC0, 0xD8
# Inside a scan, 0xFF before 0 is data, 0xFF before D0 to D7 is a restart marker, and 0xFF before 0xFF is padding.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_LENGTH = struct.Struct(">H")
_FRAME = struct.Struct(">BHHB")  # bits of a sample, height, width, components
_HUFFMAN = (0xC0, 0xC1, 0xC2)
_ARITHMETIC = (0xC9, 0xCA)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC} | {0xF7}  # C4, C8 and CC are tables and an extension
_JPEG_LS = 0xF7
_LOSSLESS = (0xC3, 0xC7, 0xCB, 0xCF)
# Application segments that tell how pixels are coded, or how the picture is turned.
_NEEDED = {0xE0: (b"JFIF",), 0xE1: (b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"), 0xEE: (b"Adobe",)}
_COMMENT = 0xFE


def read_jpeg(data: bytes) -> Header:
    """Returns the header of a JPEG, from the segments before its first scan.

    Profiles, comments, previews and the file's other pictures are removed. Pillow would read every byte of them,
    and refuse the picture if one is wrong.

    Raises:
        ImageError: ``too_complex``, ``unsupported_format``, ``zero_size``, ``truncated``.
    """
    at, parts, dropped = 2, 0, []
    kept: set[bytes] = set()
    while (found := _MARKER.search(data, at)) is not None:
        if found.start() - at > _MOST_JUNK:
            raise damaged("jpeg")
        marker = data[found.end() - 1]
        if marker in (_EOI, _SOS):
            break
        parts += 1
        if parts > MOST_PARTS:
            raise too_complex("JPEG", f"more than {MOST_PARTS} segments")
        end = _after(data, found.end(), marker)
        if marker in _FRAMES:
            _check_frame(data, found.end() + 2, marker)
        elif marker == _COMMENT or 0xE0 <= marker <= 0xEF:
            start = next((each for each in _NEEDED.get(marker, ()) if data.startswith(each, found.end() + 2)), b"")
            if start and start not in kept:
                kept.add(start)
            else:
                dropped.append((found.start(), end))
        at = end
    scan = found.start() if found is not None else len(data)
    lacks_end = data.rfind(b"\xff\xd9", scan) < 0
    return Header("jpeg", _without(data, dropped), lacks_end=lacks_end)


def check_scans(data: bytes, pixels: int) -> int:
    """Returns the number of scans of a JPEG of ``pixels`` pixels.

    Raises:
        ImageError: ``too_complex``, the scans would take too long to decode.
    """
    most = min(MOST_SCANS, MOST_SCANNED // max(pixels, 1))
    # The count is at least the number of scans. Other segments, such as previews, can hold these bytes too.
    if data.count(b"\xff\xda") <= 1:
        return 1
    scans = _count_scans(data, most + 1)
    if scans > most:
        raise too_complex("JPEG", f"more than {most} scans at this size", "save it with fewer, or as baseline JPEG")
    return scans


def covers_all(data: bytes) -> bool:
    """Returns whether the scans hold everything that the frame announces.

    A complete picture has every component, and a progressive one every bit of every coefficient. A file that was
    cut between two scans otherwise looks complete.
    """
    at, progressive = 2, False
    components: bytes = b""
    missing: dict[tuple[int, int], int] = {}
    while (found := _MARKER.search(data, at)) is not None:
        start, marker = found.end(), data[found.end() - 1]
        if marker == _EOI:
            break
        segment = data[start + 2 : _after(data, start, marker)]
        if marker in _FRAMES and len(segment) >= 6:
            progressive = marker in (0xC2, 0xCA)
            components = segment[6::3][: segment[5]]
            missing = {(each, k): 16 for each in components for k in range(64 if progressive else 1)}
        if marker == _SOS and len(segment) >= 4:
            first, last, bits = segment[-3], segment[-2], segment[-1] & 15
            for each in segment[1:-3:2]:
                for k in range(first, min(last, 63) + 1) if progressive else (0,):
                    missing[each, k] = bits
        at = _after(data, start, marker)
    return bool(missing) and not any(missing.values())


def ended(data: bytes, noise: bytes) -> bytes:
    """Returns a JPEG that lacks its end marker with noise and an end marker appended.

    A decoder that has the whole picture skips the noise. A decoder that lacks data reads the noise instead. The
    noise contains restart markers, for decoders that wait for one.
    """
    # The data may end with half of the end marker, or with the zeros of a program that reserved space in the file.
    data = data.rstrip(b"\xff") if data.endswith(b"\xff") else data
    if data.endswith(bytes(16)):
        data = data.rstrip(b"\0")
    last = max(range(8), key=lambda number: data.rfind(bytes([0xFF, 0xD0 + number])))
    following = range(last + 1, last + 9) if bytes([0xFF, 0xD0 + last]) in data else range(8)
    restarts = b"".join(bytes([0xFF, 0xD0 + number % 8]) + noise for number in following)
    return data + noise + restarts + b"\xff\xd9"


def _count_scans(data: bytes, most: int) -> int:
    """Counts the scans of a JPEG, up to ``most``.

    Everything that libjpeg may take for a marker counts as one here, so no scan can be hidden. Only segments that
    libjpeg skips by their length are skipped.
    """
    at, scans, parts = 2, 0, 0
    while scans < most and (found := _MARKER.search(data, at)) is not None:
        marker = data[found.end() - 1]
        if marker == _EOI:
            break
        scans += marker == _SOS
        parts += 1
        if parts > MOST_PARTS:
            raise too_complex("JPEG", f"more than {MOST_PARTS} segments")
        at = _after(data, found.end(), marker)
    return scans


def _after(data: bytes, at: int, marker: int) -> int:
    """Returns the end of a marker's segment, or ``at`` if the marker has none."""
    if marker >= _SOF and marker != _SOI and at + 2 <= len(data):
        return at + int(_LENGTH.unpack_from(data, at)[0])
    return at


def _check_frame(data: bytes, at: int, marker: int) -> None:
    if marker == _JPEG_LS:
        raise unsupported("JPEG-LS images")
    if marker in _LOSSLESS:
        raise unsupported("lossless JPEG images")
    if marker not in _HUFFMAN + _ARITHMETIC:
        raise unsupported("hierarchical JPEG images")
    if at + _FRAME.size > len(data):
        raise damaged("jpeg")
    bits, height, width, components = _FRAME.unpack_from(data, at)
    if bits != 8:
        raise unsupported(f"{bits}-bit JPEG images")
    if 0 in (height, width):
        raise zero_size()
    if components not in (1, 3, 4):
        raise unsupported(f"JPEG images of {components} components")


def _without(data: bytes, dropped: list[tuple[int, int]]) -> bytes:
    if not dropped:
        return data
    pieces, at = [], 0
    for start, end in dropped:
        pieces.append(data[at:start])
        at = end
    return b"".join([*pieces, data[at:]])
