"""Counts the chunks of a WEBP, and reads its size."""

import struct

from snapcap.models.processing.headers.header import MOST_PARTS, Header, too_complex

_CHUNK = struct.Struct("<4sI")


def read_webp(data: bytes) -> Header:
    """Returns the header of a WEBP. Its decoder skips chunks that it does not need, so none is removed.

    Raises:
        ImageError: ``too_complex``.
    """
    at, parts = 12, 0
    while at + 8 <= len(data):
        _, length = _CHUNK.unpack_from(data, at)
        parts += 1
        if parts > MOST_PARTS:
            raise too_complex("WEBP", f"more than {MOST_PARTS} chunks")
        at += 8 + length + (length & 1)
    return Header("webp", data, webp_size(data))


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Returns (width, height) of a WEBP from its first chunk, or None if this chunk is of no known kind."""
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
