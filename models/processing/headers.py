"""Reads the headers of image files before a codec sees the data, and removes parts that no codec needs.

For each format a function returns the `Header`. The function raises ImageError for a file that is damaged, has no
pixels, is of a kind that is not read, or has parts that cost more than its pixels.
"""

import math
import re
import struct
import zlib
from collections.abc import Iterator

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image_formats import damaged, too_complex, unsupported, zero_size

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
    lacks_end: a JPEG has no end marker.
    key: the 16-bit sample values of the one transparent colour, if Pillow does not compare them.
    frame: (left, top, right, bottom) of the first frame, if it does not cover the whole picture.
    inverted: 0 is white, where Pillow takes it for black.
    unsigned: numbers of 32 bits are never negative, where Pillow takes them for signed ones.
    masks: the bits of red, green, blue and alpha in a pixel of a BMP, if the file names them.
    variant: describes the pixels in the error of a file that Pillow does not read.
    """

    format: str
    data: bytes
    size: tuple[int, int] | None = None
    memory: int = 0
    lacks_end: bool = False
    key: tuple[int, ...] | None = None
    frame: tuple[int, int, int, int] | None = None
    inverted: bool = False
    unsigned: bool = False
    masks: tuple[int, int, int, int] | None = None
    variant: str = "of this kind"


# JPEG

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
_JPEG_FRAME = struct.Struct(">BHHB")  # bits of a sample, height, width, components
_HUFFMAN = (0xC0, 0xC1, 0xC2)
_ARITHMETIC = (0xC9, 0xCA)
_JPEG_LS = 0xF7
# 0xC4, 0xC8 and 0xCC are tables and an extension.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC} | {_JPEG_LS}
_LOSSLESS = (0xC3, 0xC7, 0xCB, 0xCF)
# Application segments that tell how pixels are coded, or how the picture is turned. libjpeg skips shorter ones.
_NEEDED_SEGMENTS = {0xE0: (b"JFIF",), 0xE1: (b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"), 0xEE: (b"Adobe",)}
_LEAST_SEGMENT = {0xE0: 16, 0xE1: 8, 0xEE: 14}  # bytes, with the two that have the length
_HEIGHT_BEHIND = b"\xff\xdc\x00\x04"  # a segment behind the first scan, with the height that a frame lacks
_COMMENT = 0xFE


def read_jpeg(data: bytes) -> Header:
    """Returns the header of a JPEG, from the segments before its first scan.

    Profiles, comments, previews and the file's other pictures are removed. Pillow would read every byte of them,
    and refuse the picture if one is wrong.
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
        end = _after_segment(data, found.end(), marker)
        if marker in _JPEG_FRAMES:
            _check_jpeg_frame(data, found.end() + 2, marker)
        elif marker == _COMMENT or 0xE0 <= marker <= 0xEF:
            start = next(
                (each for each in _NEEDED_SEGMENTS.get(marker, ()) if data.startswith(each, found.end() + 2)), b""
            )
            if start and start not in kept and end - found.end() >= _LEAST_SEGMENT[marker]:
                kept.add(start)
            else:
                dropped.append((found.start(), end))
        at = end
    scan = found.start() if found is not None else len(data)
    if found is None and scan - at > _MOST_JUNK:
        raise damaged("jpeg")
    lacks_end = data.rfind(b"\xff\xd9", scan) < 0
    return Header("jpeg", _without_segments(data, dropped), lacks_end=lacks_end)


def check_scans(data: bytes, pixels: int) -> int:
    """Returns the number of scans of a JPEG of ``pixels`` pixels. Raises ImageError if they take too long
    to decode."""
    most = min(MOST_SCANS, MOST_SCANNED // max(pixels, 1))
    # The count is at least the number of scans. Other segments, such as previews, can hold these bytes too.
    if data.count(b"\xff\xda") <= 1:
        return 1
    scans = 0
    for parts, (marker, _, _) in enumerate(_segments(data), 1):
        scans += marker == _SOS
        if scans > most:
            remedy = "save it with fewer, or as baseline JPEG"
            raise too_complex("JPEG", f"more than {most} scans at this size", remedy)
        if parts > MOST_PARTS:
            raise too_complex("JPEG", f"more than {MOST_PARTS} segments")
    return scans


def covers_all(data: bytes) -> bool:
    """Returns whether the scans hold everything that the frame announces.

    A complete picture has every component, and a progressive one every bit of every coefficient. A file that was
    cut between two scans otherwise looks complete.
    """
    progressive = False
    components: bytes = b""
    missing: dict[tuple[int, int], int] = {}
    for marker, start, end in _segments(data):
        segment = data[start + 2 : end]
        if marker in _JPEG_FRAMES and len(segment) >= 6:
            progressive = marker in (0xC2, 0xCA)
            components = segment[6::3][: segment[5]]
            missing = {(each, k): 16 for each in components for k in range(64 if progressive else 1)}
        if marker == _SOS and len(segment) >= 4:
            first, last, bits = segment[-3], segment[-2], segment[-1] & 15
            for each in segment[1:-3:2]:
                for k in range(first, min(last, 63) + 1) if progressive else (0,):
                    missing[each, k] = bits
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


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields the marker of each segment up to the end marker, and the offsets behind the marker and the segment.

    Everything that libjpeg may take for a marker counts as one here, so no scan can be hidden. Only segments that
    libjpeg skips by their length are skipped.
    """
    at = 2
    while (found := _MARKER.search(data, at)) is not None and (marker := data[found.end() - 1]) != _EOI:
        at = _after_segment(data, found.end(), marker)
        yield marker, found.end(), at


def _after_segment(data: bytes, at: int, marker: int) -> int:
    """Returns the end of a marker's segment, or ``at`` if the marker has none."""
    if marker >= _SOF and marker != _SOI and at + 2 <= len(data):
        return at + int(_LENGTH.unpack_from(data, at)[0])
    return at


def _check_jpeg_frame(data: bytes, at: int, marker: int) -> None:
    if marker == _JPEG_LS:
        raise unsupported("JPEG-LS images")
    if marker in _LOSSLESS:
        raise unsupported("lossless JPEG images")
    if marker not in _HUFFMAN + _ARITHMETIC:
        raise unsupported("hierarchical JPEG images")
    if at + _JPEG_FRAME.size > len(data):
        raise damaged("jpeg")
    bits, height, width, components = _JPEG_FRAME.unpack_from(data, at)
    if bits != 8:
        raise unsupported(f"{bits}-bit JPEG images")
    if height == 0 and _HEIGHT_BEHIND in data:
        raise unsupported("JPEG images that have their height behind their pixels")
    if 0 in (height, width):
        raise zero_size()
    if components not in (1, 3, 4):
        raise unsupported(f"JPEG images of {components} components")


def _without_segments(data: bytes, dropped: list[tuple[int, int]]) -> bytes:
    starts = (0, *(end for _, end in dropped))
    ends = (*(start for start, _ in dropped), len(data))
    return b"".join([data[start:end] for start, end in zip(starts, ends, strict=True)]) if dropped else data


# PNG

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_HEADER = struct.Struct(">IIBB")  # width, height, bits of a sample, kind of colour
_PNG_GREY, _PNG_RGB, _PNG_PALETTE = 0, 2, 3
_PNG_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
_XMP = b"XML:com.adobe.xmp\0"
# ImageMagick writes EXIF blocks as text, in which Pillow finds how the picture is turned.
_EXIF_TEXTS = (b"Raw profile type exif\0", b"Raw profile type APP1\0")
_MOST_PNG_TEXT = 1 << 20  # bytes; Pillow refuses the picture of a longer text
_MOST_UNPACKED = 8  # texts; each may be a kilobyte that unpacks to a megabyte


def read_png(data: bytes) -> Header:
    """Returns the header of a PNG.

    Pillow reads every chunk, and refuses the picture if one is large or wrong. Kept are the critical chunks, the
    transparent colour and the picture's orientation. Later frames of an animation are removed.
    """
    reader = _PngReader(data)
    at, parts = len(_PNG_SIGNATURE), 0
    while at + _PNG_CHUNK.size <= len(data):
        length, kind = _PNG_CHUNK.unpack_from(data, at)
        parts += 1
        if parts > MOST_PARTS:
            raise too_complex("PNG", f"more than {MOST_PARTS} chunks")
        end = at + _PNG_CHUNK.size + length + 4
        if parts == 1 and kind == b"CgBI":
            raise unsupported("PNG images that were changed for iPhone apps (CgBI)")
        reader.take(kind, at, end)
        at = end
        if kind == b"IEND":
            break
    return Header("png", reader.joined(), memory=reader.memory, key=reader.key)


class _PngReader:
    """Chooses the chunks that Pillow gets."""

    def __init__(self, data: bytes) -> None:
        self.memory = 0
        self.key: tuple[int, ...] | None = None
        self._data = data
        self._pieces: list[bytes] = []
        self._from = 0  # start of kept data that is not in pieces yet
        self._to = len(_PNG_SIGNATURE)  # end of that data
        self._depth = 8
        self._colour = -1
        self._pixels = 0
        self._seen: set[bytes] = set()
        self._unpacked = 0  # compressed texts that were looked into

    def take(self, kind: bytes, at: int, end: int) -> None:
        if kind == b"IHDR" and self._colour < 0:
            self._read_size(at)
        if kind in _PNG_CRITICAL:
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
        if at + 8 + _PNG_HEADER.size > len(self._data):
            raise damaged("png")
        width, height, self._depth, self._colour = _PNG_HEADER.unpack_from(self._data, at + 8)
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
        if self._colour == _PNG_PALETTE:
            if 0 < len(content) <= 256 and self._is_whole(at, end):
                self._keep(at, end)
            return
        samples = {_PNG_GREY: 1, _PNG_RGB: 3}.get(self._colour)
        if samples is None or len(content) != 2 * samples or not self._is_whole(at, end):
            return
        key = struct.unpack(f">{samples}H", content)
        if self._depth == 16:
            self.key = key
            # The low bytes of the samples are decoded separately.
            self.memory = 8 * self._pixels
            return
        most = (1 << self._depth) - 1
        scaled = struct.pack(f">4s{samples}H", b"tRNS", *((value & most) * 255 // most for value in key))
        chunk = struct.pack(">I", len(scaled) - 4) + scaled + zlib.crc32(scaled).to_bytes(4, "big")
        self._pieces += [self._data[self._from : self._to], chunk]
        self._from = self._to = end

    def _tells_turn(self, kind: bytes, at: int, end: int) -> bool:
        """Returns whether a text chunk is a block of EXIF or XMP that Pillow reads."""
        start = self._data[at : at + len(_EXIF_TEXTS[0]) + 5]
        if kind == b"iTXt":
            # A flag behind the keyword tells whether the text is compressed.
            return start.startswith(_XMP + b"\0") and end - at <= _MOST_PNG_TEXT
        keyword = next((each for each in _EXIF_TEXTS if start.startswith(each)), None)
        if keyword is None or end - at > _MOST_PNG_TEXT:
            return False
        if kind == b"tEXt":
            return True
        self._unpacked += 1
        return self._unpacked <= _MOST_UNPACKED and _unpacks(self._data[at + len(keyword) + 1 : end])


def _unpacks(packed: bytes) -> bool:
    """Returns whether compressed text is valid and no longer than Pillow reads."""
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(packed, _MOST_PNG_TEXT)
    except zlib.error:
        return False
    return unpacker.eof


# WEBP

_WEBP_CHUNK = struct.Struct("<4sI")


def read_webp(data: bytes) -> Header:
    """Returns the header of a WEBP. Its decoder skips chunks that it does not need, so none is removed.

    A file may announce more bytes than it has: it lacks a chunk that describes the picture, or the byte that pads
    its last chunk. The decoder refuses such a file, so it gets the chunks that are whole.
    """
    at, parts, whole = 12, 0, 12
    while at + _WEBP_CHUNK.size <= len(data):
        _, length = _WEBP_CHUNK.unpack_from(data, at)
        parts += 1
        if parts > MOST_PARTS:
            raise too_complex("WEBP", f"more than {MOST_PARTS} chunks")
        at += _WEBP_CHUNK.size + length
        if at <= len(data):
            whole = at
        at += length & 1
    if int.from_bytes(data[4:8], "little") + 8 > len(data) and whole > 12:
        padding = b"\0" * (whole & 1)
        size = struct.pack("<I", whole + len(padding) - 8)
        data = b"".join([data[:4], size, data[8:whole], padding])
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


# GIF

_GIF_SCREEN = struct.Struct("<HHB")  # width, height, flags
_GIF_FRAME = struct.Struct("<HHHHB")  # left, top, width, height, flags
_GIF_CONTROL = 0xF9
# A comment of 20 MiB has 82,000 blocks of 255 bytes.
_MOST_GIF_BLOCKS = 1 << 20


def read_gif(data: bytes) -> Header:
    """Returns the header of a GIF, with data that ends with the first frame's part of the file.

    Comments and other extensions are removed. The frame's disposal method is removed too, because Pillow would
    make a picture for it.
    """
    if len(data) < 13:
        raise damaged("gif")
    width, height, flags = _GIF_SCREEN.unpack_from(data, 6)
    start = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)  # behind the palette that the flags announce
    at, control = _first_gif_frame(data, start)
    left, top, across, down, _ = _GIF_FRAME.unpack_from(data, at + 1)
    size = max(width, left + across), max(height, top + down)
    if 0 in size or 0 in (across, down):
        raise zero_size()
    box = (left, top, left + across, top + down)
    frame = None if box == (0, 0, *size) or control[3] & 1 else box
    return Header("gif", b"".join([data[:start], control, data[at:]]), size, frame=frame)


def _first_gif_frame(data: bytes, at: int) -> tuple[int, bytes]:
    """Returns the offset of the first frame, and an extension that names the frame's transparent colour."""
    parts, blocks = 0, 0
    flags, clear = 0, 0
    while at + 1 + _GIF_FRAME.size <= len(data):
        if data[at] == 0x2C:
            return at, bytes([0x21, _GIF_CONTROL, 4, flags, 0, 0, clear, 0])
        parts += 1
        if parts > MOST_PARTS:
            raise too_complex("GIF", f"more than {MOST_PARTS} extensions")
        if data[at] != 0x21:  # Pillow skips bytes that begin no block
            at += 1
            continue
        if data[at + 1] == _GIF_CONTROL and data[at + 2] >= 4:
            flags, clear = data[at + 3] & 1, data[at + 6]
        at += 2
        while at < len(data) and data[at]:
            at += data[at] + 1
            blocks += 1
            if blocks > _MOST_GIF_BLOCKS:
                raise too_complex("GIF", f"more than {_MOST_GIF_BLOCKS} blocks before its picture")
        at += 1
    raise damaged("gif")


# BMP

_OLD_BMP = 12  # header size of OS/2 and Windows 2, in bytes
_BMP_RAW, _BMP_RLE8, _BMP_RLE4, _BMP_MASKS = range(4)
_BMP_ALPHA_MASKS = 6
_BMP_V3, _BMP_OS2, _BMP_V4 = 56, 64, 108  # header sizes in bytes; V3 and later have a mask of alpha
_BMP_COMPRESSION, _BMP_COLOURS, _BMP_FIRST_MASK = 30, 46, 54  # offsets in the file
_PLAIN_MASKS = {16: (0x7C00, 0x3E0, 0x1F, 0), 32: (0xFF0000, 0xFF00, 0xFF, 0xFF000000)}
_BMP_DEPTHS = (1, 4, 8, 16, 24, 32)
# Pillow unpacks runs in Python: a second for this many pixels, or for this many bytes of the file.
MOST_RUN_PIXELS = 8_000_000
MOST_RUN_BYTES = 4_000_000


def read_bmp(data: bytes) -> Header:
    """Returns the header of a BMP.

    Pillow reads few masks of bits, so it gets the file as one without masks.
    """
    head = int.from_bytes(data[14:18], "little")
    if len(data) < 14 + head:
        raise damaged("bmp")
    if head == _OLD_BMP:
        width, height, _, depth = struct.unpack_from("<4H", data, 18)
        compression = _BMP_RAW
    else:
        width, height, _, depth, compression = struct.unpack_from("<IiHHI", data, 18)
        height = abs(height)  # negative if the first row is the top one
        width &= 0xFFFFFFFF
    if 0 in (width, height):
        raise zero_size()
    if compression > _BMP_MASKS and compression != _BMP_ALPHA_MASKS:
        raise unsupported(f"BMP images of compression {compression}")
    if depth not in _BMP_DEPTHS:
        raise unsupported(f"BMP images of {depth} bits")
    masks = _bmp_masks(data, head, depth, compression)
    if masks is not None:
        return Header("bmp", _with_number(data, _BMP_COMPRESSION, _BMP_RAW), (width, height), masks=masks)
    if depth <= 8 and head > _OLD_BMP and int.from_bytes(data[_BMP_COLOURS : _BMP_COLOURS + 4], "little") > 256:
        data = _with_number(data, _BMP_COLOURS, 0)
    if compression not in (_BMP_RLE8, _BMP_RLE4):
        return Header("bmp", data, (width, height), variant=f"of {depth} bits with these masks")
    if width * height > MOST_RUN_PIXELS or len(data) > MOST_RUN_BYTES:
        raise too_complex("BMP", "its pixels in runs and is large", "save it without compression")
    return Header("bmp", _with_all_rows(data, width, height), (width, height), memory=4 * width * height)


def _bmp_masks(data: bytes, head: int, depth: int, compression: int) -> tuple[int, int, int, int] | None:
    """Returns the bits of red, green, blue and alpha in a pixel. None for the layouts that Pillow reads by
    itself."""
    if depth not in _PLAIN_MASKS:
        return None
    if compression == _BMP_RAW:
        return _PLAIN_MASKS[depth] if depth == 32 and head >= _BMP_V4 else None
    count = 4 if compression == _BMP_ALPHA_MASKS or (head >= _BMP_V3 and head != _BMP_OS2) else 3
    if len(data) < _BMP_FIRST_MASK + 4 * count:
        raise damaged("bmp")
    found = [mask & (1 << depth) - 1 for mask in struct.unpack_from(f"<{count}I", data, _BMP_FIRST_MASK)]
    if not any(found[:3]):
        return _PLAIN_MASKS[depth]
    if any("0" in f"{mask:b}".rstrip("0") for mask in found if mask):  # the bits of a colour lie apart
        raise unsupported(f"BMP images of {depth} bits with these masks")
    red, green, blue, alpha = [*found, 0][:4]
    return red, green, blue, alpha


def _with_all_rows(data: bytes, width: int, height: int) -> bytes:
    """Returns a BMP in runs with all rows, as Pillow refuses a picture that ends before its last row."""
    end = data.rfind(b"\0\1")
    if end < 0 or data[end + 2 :].strip(b"\0"):
        return data
    row = b"\xff\0" * math.ceil(width / 255) + b"\0\0"
    return data[:end] + row * height


def _with_number(data: bytes, at: int, number: int) -> bytes:
    return data[:at] + number.to_bytes(4, "little") + data[at + 4 :]
