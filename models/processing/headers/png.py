"""Counts the chunks of a PNG, and removes chunks that no decoder needs."""

import struct
import zlib

from snapcap.models.processing.headers.header import (
    MOST_PARTS,
    Header,
    damaged,
    too_complex,
    unsupported,
    zero_size,
)

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHUNK = struct.Struct(">I4s")
_HEADER = struct.Struct(">IIBB")  # width, height, bits of a sample, kind of colour
_GREY, _RGB, _PALETTE = 0, 2, 3
_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
_XMP = b"XML:com.adobe.xmp\0"
# ImageMagick writes EXIF blocks as text, in which Pillow finds how the picture is turned.
_EXIF_TEXTS = (b"Raw profile type exif\0", b"Raw profile type APP1\0")
_MOST_TEXT = 1 << 20  # bytes; Pillow refuses the picture of a longer text


def read_png(data: bytes) -> Header:
    """Returns the header of a PNG.

    Pillow reads every chunk, and refuses the picture if one is large or wrong. Kept are the critical chunks, the
    transparent colour and the picture's orientation. Later frames of an animation are removed.

    Raises:
        ImageError: ``too_complex``, ``zero_size``, ``unsupported_format``, ``truncated``.
    """
    reader = _Reader(data)
    at, parts = len(_SIGNATURE), 0
    while at + _CHUNK.size <= len(data):
        length, kind = _CHUNK.unpack_from(data, at)
        parts += 1
        if parts > MOST_PARTS:
            raise too_complex("PNG", f"more than {MOST_PARTS} chunks")
        end = at + _CHUNK.size + length + 4
        if parts == 1 and kind == b"CgBI":
            raise unsupported("PNG images that were changed for iPhone apps (CgBI)")
        reader.take(kind, at, end)
        at = end
        if kind == b"IEND":
            break
    return Header("png", reader.joined(), memory=reader.memory, key=reader.key)


class _Reader:
    """Chooses the chunks that Pillow gets."""

    def __init__(self, data: bytes) -> None:
        self.memory = 0
        self.key: tuple[int, ...] | None = None
        self._data = data
        self._pieces: list[bytes] = []
        self._from = 0  # start of kept data that is not in pieces yet
        self._to = len(_SIGNATURE)  # end of that data
        self._depth = 8
        self._colour = -1
        self._pixels = 0
        self._seen: set[bytes] = set()

    def take(self, kind: bytes, at: int, end: int) -> None:
        if kind == b"IHDR" and self._colour < 0:
            self._read_size(at)
        if kind in _CRITICAL:
            self._keep(at, end)
        elif kind == b"tRNS" and b"IDAT" not in self._seen:
            self._read_transparency(at, end)
        elif kind == b"eXIf" or (kind in (b"tEXt", b"zTXt", b"iTXt") and self._tells_turn(kind, at + 8, end - 4)):
            if kind not in self._seen and self._is_whole(at, end):
                self._keep(at, end)
        else:
            return
        self._seen.add(kind)

    def joined(self) -> bytes:
        if not self._pieces and self._to >= len(self._data):
            return self._data
        return b"".join([*self._pieces, self._data[self._from : self._to]])

    def _read_size(self, at: int) -> None:
        if at + 8 + _HEADER.size > len(self._data):
            raise damaged("png")
        width, height, self._depth, self._colour = _HEADER.unpack_from(self._data, at + 8)
        if 0 in (width, height):
            raise zero_size()
        if self._depth not in (1, 2, 4, 8, 16):
            raise damaged("png")
        self._pixels = width * height

    def _keep(self, at: int, end: int) -> None:
        if at != self._to:
            self._pieces.append(self._data[self._from : self._to])
            self._from = at
        self._to = end

    def _is_whole(self, at: int, end: int) -> bool:
        """Returns whether a chunk's checksum is right. A damaged chunk that is not critical is dropped, and the
        picture kept."""
        if end > len(self._data):
            return False
        return zlib.crc32(memoryview(self._data)[at + 4 : end - 4]) == int.from_bytes(
            self._data[end - 4 : end], "big"
        )

    def _read_transparency(self, at: int, end: int) -> None:
        """Keeps the transparent colour, scaled to 8 bits: Pillow compares it with samples that it has scaled to 8
        bits."""
        content = self._data[at + 8 : end - 4]
        if self._colour == _PALETTE:
            if 0 < len(content) <= 256 and self._is_whole(at, end):
                self._keep(at, end)
            return
        samples = {_GREY: 1, _RGB: 3}.get(self._colour)
        if samples is None or len(content) != 2 * samples or not self._is_whole(at, end):
            return
        key = struct.unpack(f">{samples}H", content)
        if self._depth == 16:
            self.key = key
            # The low bytes of the samples are decoded separately.
            self.memory = 8 * self._pixels
            return
        most = (1 << self._depth) - 1
        scaled = struct.pack(f">{samples}H", *((value & most) * 255 // most for value in key))
        self._pieces += [self._data[self._from : self._to], _chunk(b"tRNS", scaled)]
        self._from = self._to = end

    def _tells_turn(self, kind: bytes, at: int, end: int) -> bool:
        """Returns whether a text chunk is a block of EXIF or XMP that Pillow reads."""
        start = self._data[at : at + len(_EXIF_TEXTS[0]) + 5]
        if kind == b"iTXt":
            # A flag behind the keyword tells whether the text is compressed.
            return start.startswith(_XMP + b"\0") and end - at <= _MOST_TEXT
        keyword = next((each for each in _EXIF_TEXTS if start.startswith(each)), None)
        if keyword is None or end - at > _MOST_TEXT:
            return False
        return kind == b"tEXt" or _unpacks(self._data[at + len(keyword) + 1 : end])


def _unpacks(packed: bytes) -> bool:
    """Returns whether compressed text is valid and no longer than Pillow reads."""
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(packed, _MOST_TEXT)
    except zlib.error:
        return False
    return unpacker.eof


def _chunk(kind: bytes, content: bytes) -> bytes:
    return _CHUNK.pack(len(content), kind) + content + zlib.crc32(kind + content).to_bytes(4, "big")
