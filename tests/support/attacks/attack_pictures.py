"""Makes images whose files are small and whose decoding is not."""

import io
import struct
import zlib

from PIL import Image
from support.parity.pictures import encoded

SOS, EOI = 0xDA, 0xD9


def many_scans(width: int, height: int, scans: int) -> bytes:
    """A progressive JPEG, whose last scan comes again and again: 26 bytes for a walk over the whole picture."""
    jpeg = encoded(Image.new("RGB", (width, height), (200, 30, 40)), "JPEG", progressive=True)
    ends = scan_ends(jpeg)
    return jpeg[: ends[-1]] + jpeg[ends[-2] : ends[-1]] * (scans - len(ends)) + jpeg[ends[-1] :]


def scan_ends(jpeg: bytes) -> list[int]:
    """Where each scan of a JPEG ends."""
    at, ends = 2, []
    while (marker := jpeg[at + 1]) != EOI:
        at += 2 + struct.unpack_from(">H", jpeg, at + 2)[0]
        if marker == SOS:
            while jpeg[at] != 0xFF or jpeg[at + 1] in (0, *range(0xD0, 0xD8)):
                at += 1
            ends.append(at)
    return ends


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def with_segments(jpeg: bytes, *segments: bytes) -> bytes:
    """A JPEG with these behind its first bytes."""
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunks(png: bytes, *chunks: bytes) -> bytes:
    """A PNG with these behind its header."""
    return png[:33] + b"".join(chunks) + png[33:]


def packed_text(number: int) -> bytes:
    """A chunk of a PNG of 100 bytes, that becomes 800 KB of text."""
    content = zlib.compress("\U0001f600".encode() * 200_000, 9)
    return chunk(b"iTXt", b"key%d\0\1\0\0\0" % number + content)


def flat_webp(width: int, height: int) -> bytes:
    """A lossless WEBP of one colour: 34 bytes, whatever its size."""
    bits = (width - 1) | (height - 1) << 14
    data = bytearray(encoded(Image.new("RGB", (16, 16)), "WEBP", lossless=True))
    at = data.index(b"VP8L") + 9
    data[at : at + 4] = struct.pack("<I", struct.unpack_from("<I", data, at)[0] & 0xF0000000 | bits)
    return bytes(data)


def flat_png(mode: str, width: int, height: int) -> bytes:
    """A PNG of one colour, a thousandth of its pixels in size."""
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG", compress_level=9)
    return buffer.getvalue()


def with_key(png: bytes, *samples: int) -> bytes:
    """A PNG, grey or RGB, one colour of which is transparent; ``samples`` as deep as its own."""
    return with_chunks(png, chunk(b"tRNS", struct.pack(f">{len(samples)}H", *samples)))


def bmp_in_runs(width: int, height: int, row: bytes) -> bytes:
    """A BMP of 256 greys, each row of which is these runs, padded with black."""
    head = bytearray(encoded(Image.new("L", (1, 1)), "BMP")[:1078])
    struct.pack_into("<ii", head, 18, width, height)
    struct.pack_into("<I", head, 30, 1)
    return bytes(head) + (row + b"\0\0") * height + b"\0\1"
