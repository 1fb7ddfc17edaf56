"""Reads the size of a BMP, and refuses files that Pillow does not read or decodes slowly."""

import struct

from snapcap.models.processing.headers.header import Header, damaged, too_complex, unsupported, zero_size

_OLD = 12  # header size of OS/2 and Windows 2, in bytes
_RAW, _RLE8, _RLE4, _MASKS = range(4)
_DEPTHS = (1, 4, 8, 16, 24, 32)
# Pillow unpacks runs in Python: a second for this many pixels, or for this many bytes of the file.
MOST_RUN_PIXELS = 8_000_000
MOST_RUN_BYTES = 4_000_000


def read_bmp(data: bytes) -> Header:
    """Returns the header of a BMP.

    Raises:
        ImageError: ``unsupported_format``, ``too_complex``, ``zero_size``, ``truncated``.
    """
    head = int.from_bytes(data[14:18], "little")
    if len(data) < 14 + head:
        raise damaged("bmp")
    if head == _OLD:
        width, height, _, depth = struct.unpack_from("<4H", data, 18)
        compression = _RAW
    else:
        width, height, _, depth, compression = struct.unpack_from("<IiHHI", data, 18)
        height = abs(height)  # negative if the first row is the top one
        width &= 0xFFFFFFFF
    if 0 in (width, height):
        raise zero_size()
    if compression > _MASKS:
        raise unsupported(f"BMP images of compression {compression}")
    if depth not in _DEPTHS:
        raise unsupported(f"BMP images of {depth} bits")
    if compression not in (_RLE8, _RLE4):
        return Header("bmp", data, (width, height))
    if width * height > MOST_RUN_PIXELS or len(data) > MOST_RUN_BYTES:
        raise too_complex("BMP", "its pixels in runs and is large", "save it without compression")
    return Header("bmp", data, (width, height), memory=4 * width * height)
