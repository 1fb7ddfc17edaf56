"""Finds the first frame of a GIF, and removes the parts before and after it."""

import struct

from snapcap.models.processing.headers.header import MOST_PARTS, Header, damaged, too_complex, zero_size

_SCREEN = struct.Struct("<HHB")  # width, height, flags
_FRAME = struct.Struct("<HHHHB")  # left, top, width, height, flags
_CONTROL = 0xF9
# A comment of 20 MiB has 82,000 blocks of 255 bytes.
_MOST_BLOCKS = 1 << 20


def read_gif(data: bytes) -> Header:
    """Returns the header of a GIF, with data that ends with the first frame's part of the file.

    Comments and other extensions are removed. The frame's disposal method is removed too, because Pillow would
    make a picture for it.

    Raises:
        ImageError: ``too_complex``, ``zero_size``, ``truncated``.
    """
    if len(data) < 13:
        raise damaged("gif")
    width, height, flags = _SCREEN.unpack_from(data, 6)
    start = 13 + _palette(flags)
    at, control = _first_frame(data, start)
    left, top, across, down, _ = _FRAME.unpack_from(data, at + 1)
    size = max(width, left + across), max(height, top + down)
    if 0 in size or 0 in (across, down):
        raise zero_size()
    box = (left, top, left + across, top + down)
    frame = None if box == (0, 0, *size) or control[3] & 1 else box
    return Header("gif", b"".join([data[:start], control, data[at:]]), size, frame=frame)


def _first_frame(data: bytes, at: int) -> tuple[int, bytes]:
    """Returns the offset of the first frame, and an extension that names the frame's transparent colour."""
    parts, blocks = 0, 0
    flags, clear = 0, 0
    while at + 1 + _FRAME.size <= len(data):
        if data[at] == 0x2C:
            return at, bytes([0x21, _CONTROL, 4, flags, 0, 0, clear, 0])
        parts += 1
        if parts > MOST_PARTS:
            raise too_complex("GIF", f"more than {MOST_PARTS} extensions")
        if data[at] != 0x21:  # Pillow skips bytes that begin no block
            at += 1
            continue
        if data[at + 1] == _CONTROL and data[at + 2] >= 4:
            flags, clear = data[at + 3] & 1, data[at + 6]
        at += 2
        while at < len(data) and data[at]:
            at += data[at] + 1
            blocks += 1
            if blocks > _MOST_BLOCKS:
                raise too_complex("GIF", f"more than {_MOST_BLOCKS} blocks before its picture")
        at += 1
    raise damaged("gif")


def _palette(flags: int) -> int:
    """Returns the size in bytes of the palette that a header's flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0
