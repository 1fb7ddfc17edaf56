"""Reads the header of a TIFF before a codec sees the data, and corrects how Pillow unpacks its numbers.

Pillow gets a directory with only the tags of the first page that it needs.
"""

import math
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from snapcap.models.processing.headers import MOST_PARTS, MOST_SCANNED, MOST_SCANS, Header
from snapcap.models.processing.image_formats import damaged, too_complex, unsupported, zero_size

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_STRIPS, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANES = 273, 277, 278, 279, 284
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 322, 323, 324, 325
_PALETTE, _EXTRA, _NUMBERS = 320, 338, 339  # the latter: unsigned, signed or floating numbers
_SUB_DIRECTORIES, _DNG = 330, 50706
# The numbers below are fill order, orientation, options of fax codes, predictor, palette, extra samples, number
# format, JPEG's tables, coefficients and subsampling of YCbCr, and its reference black and white.
_KEPT_TAGS = frozenset(
    {_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _STRIPS, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANES}
    | {_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES}
    | {266, 274, 292, 293, 317, _PALETTE, _EXTRA, _NUMBERS, 347, 529, 530, 531, 532}
)
_TIFF_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_TIFF_INTEGERS = {1: "B", 3: "H", 4: "I"}
_TIFF_RAW, _TIFF_JPEG = 1, 7
# Uncompressed, fax, LZW, JPEG, Deflate and PackBits.
_TIFF_COMPRESSIONS = frozenset({_TIFF_RAW, 2, 3, 4, 5, _TIFF_JPEG, 8, 32773, 32946})
_NOT_READ = {6: "old JPEG", 34712: "JPEG 2000", 34887: "LERC", 34925: "LZMA", 50000: "Zstandard", 50001: "WEBP"}
_CAMERA = (32803, 34892)  # samples of a colour filter array, and linear raw data
_WHITE_IS_ZERO, _YCBCR, _LAB = 0, 6, 8
_SUBSAMPLING = 530
_MOST_SAMPLES = 6  # Pillow's own limit of samples per pixel


class _TiffEntry(NamedTuple):
    kind: int
    values: int  # number of values
    at: int  # offset of the values in the file
    raw: bytes  # the entry's last four bytes in the directory


def read_tiff(data: bytes) -> Header:
    """Returns the header of a TIFF's first page. Raises ImageError as the functions of `headers` do."""
    directory = _TiffDirectory(data)
    entries = directory.entries
    photometric = directory.number(_PHOTOMETRIC, 0)
    if _DNG in entries or photometric in _CAMERA:
        raise unsupported("camera RAW images")
    # The first page of NEF, ARW and other RAW files is a thumbnail.
    if directory.number(254, 0) & 1 and _SUB_DIRECTORIES in entries:
        raise unsupported("camera RAW images")
    if photometric == _LAB:
        raise unsupported("TIFF images in CIELAB colours")
    size = directory.number(_WIDTH, 0), directory.number(_HEIGHT, 0)
    if 0 in size:
        raise zero_size()
    compression = directory.number(_COMPRESSION, _TIFF_RAW)
    if compression not in _TIFF_COMPRESSIONS:
        raise unsupported(f"TIFF images with {_NOT_READ.get(compression, f'compression {compression}')}")
    samples, bits = directory.number(_SAMPLES, 1), directory.numbers(_BITS, _MOST_SAMPLES) or (1,)
    if samples > _MOST_SAMPLES or max(bits) > 64:
        raise unsupported(f"TIFF images of {samples} samples and {max(bits)} bits")
    pieces = _TiffPieces(directory, size, samples, max(bits))
    pieces.check(compression)
    inverted = photometric == _WHITE_IS_ZERO and max(bits) > 8
    by_pillow = compression == _TIFF_RAW and pieces.planes == 1 and not pieces.by_groups
    memory = 0 if by_pillow else pieces.memory  # libtiff reads all others
    # libtiff gets a copy of the file.
    unsigned, written, memory = directory.number(_NUMBERS, 1) == 1, directory.written(pieces), memory + len(data)
    variant = f"with {samples} × {max(bits)} bits a pixel, of this kind,"
    return Header("tiff", written, size, memory=memory, inverted=inverted, unsigned=unsigned, variant=variant)


class _TiffDirectory:
    """The tags of the first page."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.order = "<" if data.startswith(b"II") else ">"
        self._entry = struct.Struct(f"{self.order}HHI4s")
        at = self._unpack("I", 4)
        count = self._unpack("H", at)
        if count == 0 or at + 2 + count * self._entry.size > len(data):
            raise damaged("tiff")
        self.entries: dict[int, _TiffEntry] = {}
        for number in range(count):
            start = at + 2 + number * self._entry.size
            tag, kind, values, inline = self._entry.unpack_from(data, start)
            length = _TIFF_SIZES.get(kind, 0) * values
            place = start + 8 if length <= 4 else struct.unpack(f"{self.order}I", inline)[0]
            self.entries.setdefault(tag, _TiffEntry(kind, values, place, inline))

    def numbers(self, tag: int, most: int) -> tuple[int, ...]:
        """Returns up to ``most`` values of a tag. Empty if the tag is missing."""
        entry = self.entries.get(tag)
        if entry is None:
            return ()
        letter, count = _TIFF_INTEGERS.get(entry.kind), min(entry.values, most)
        if letter is None or not count or entry.at + count * _TIFF_SIZES[entry.kind] > len(self.data):
            raise damaged("tiff")
        return struct.unpack_from(f"{self.order}{count}{letter}", self.data, entry.at)

    def number(self, tag: int, default: int) -> int:
        values = self.numbers(tag, 1)
        return values[0] if values else default

    def written(self, pieces: "_TiffPieces") -> bytes:
        """Returns the file with a new directory at its end, which has only the tags that are needed and no further
        pages."""
        kept = []
        padding = b"\0" * (len(self.data) & 1)
        palette = self._wide_palette()
        for tag in sorted(_KEPT_TAGS & self.entries.keys()):
            kind, count, at, raw = self.entries[tag]
            if tag == _PALETTE and palette:
                raw = struct.pack(f"{self.order}I", len(self.data) + len(padding))
            size = _TIFF_SIZES.get(kind, 0)
            if tag in pieces.tags and count > pieces.count:
                count = pieces.count  # Pillow would read pieces that are not in the picture
                if count * size <= 4:  # values that fit lie in the directory itself
                    raw = self.data[at : at + count * size].ljust(4, b"\0")
            if not size or count > MOST_PARTS * 2 or at + count * size > len(self.data):
                raise damaged("tiff")
            kept.append(self._entry.pack(tag, kind, count, raw))
        head = self.data[:4] + struct.pack(f"{self.order}I", len(self.data) + len(padding) + len(palette))
        length = struct.pack(f"{self.order}H", len(kept))
        return b"".join([head, memoryview(self.data)[8:], padding, palette, length, *kept, bytes(4)])

    def _wide_palette(self) -> bytes:
        """Returns the palette in 16 bits a number, if a program wrote it in 8, as libtiff finds out too."""
        entry = self.entries.get(_PALETTE)
        values = self.numbers(_PALETTE, 3 << 8) if entry and entry.kind == 3 and entry.values <= 3 << 8 else ()
        if max(values, default=256) > 255:
            return b""
        return struct.pack(f"{self.order}{len(values)}H", *(257 * value for value in values))

    def _unpack(self, letter: str, at: int) -> int:
        try:
            return int(struct.unpack_from(f"{self.order}{letter}", self.data, at)[0])
        except struct.error:
            raise damaged("tiff") from None


class _TiffPieces:
    """The strips or tiles of a page."""

    def __init__(self, directory: _TiffDirectory, size: tuple[int, int], samples: int, bits: int) -> None:
        self._directory = directory
        width, height = size
        self.planes = planes = samples if directory.number(_PLANES, 1) == 2 else 1
        if _TILES in directory.entries and _STRIPS not in directory.entries:
            self.tags = (_TILES, _TILE_BYTES)
            across, down = directory.number(_TILE_WIDTH, 0), directory.number(_TILE_HEIGHT, 0)
        else:
            self.tags = (_STRIPS, _STRIP_BYTES)
            across, down = width, min(directory.number(_ROWS, height), height)
        if 0 in (across, down):
            raise damaged("tiff")
        self.count = math.ceil(width / across) * math.ceil(height / down) * planes
        self._pixels = across * down
        self._tiled = self.tags == (_TILES, _TILE_BYTES)
        self._rows = down, height
        self._row_bytes = math.ceil(across * bits * (1 if planes > 1 else samples) / 8)
        photometric, groups = directory.number(_PHOTOMETRIC, 0), directory.numbers(_SUBSAMPLING, 2)
        columns, self._shared = _subsampling(photometric, groups) if planes == 1 else (1, 1)
        self.by_groups = columns * self._shared > 1
        if self.by_groups:
            self._row_bytes = math.ceil(across / columns) * (columns * self._shared + 2)
        # The memory of an unpacked piece, and of its conversion to RGBA.
        self.memory = self._pixels * (samples * bits // 8 + 1 + 4)

    def check(self, compression: int) -> None:
        """Refuses pages that take much longer than their pixels and bytes suggest."""
        offsets, lengths = self.tags
        if self.count > MOST_PARTS:
            raise too_complex("TIFF", f"more than {MOST_PARTS} strips or tiles", "save it with larger ones")
        places = self._directory.numbers(offsets, self.count)
        if len(places) < self.count:
            raise damaged("tiff")
        data = self._directory.data
        sizes = self._directory.numbers(lengths, self.count) if compression != _TIFF_RAW else self._uncompressed()
        # Behind the file's end Pillow would find the new directory, and read it as pixels.
        if any(place + size > len(data) for place, size in zip(places, sizes, strict=False)):
            raise damaged("tiff")
        if compression == _TIFF_RAW:
            return
        if sum(sizes) > 2 * len(data) + MOST_PARTS:  # data shared by several pieces is unpacked once for each
            raise too_complex("TIFF", "strips or tiles that lie on each other", "save it anew")
        if compression == _TIFF_JPEG:
            scans = data.count(b"\xff\xda")
            if scans > MOST_SCANS * self.count or scans * self._pixels > max(
                MOST_SCANNED, self.count * self._pixels
            ):
                raise too_complex("TIFF", "too many scans of JPEG at this size", "save it with fewer")

    def _uncompressed(self) -> list[int]:
        """Returns the bytes of each uncompressed piece. The last strip ends with the picture, a tile never does."""
        down, height = self._rows
        strips = math.ceil(height / down)
        last = down if self._tiled else height - (strips - 1) * down
        rows = [last if number % strips == strips - 1 else down for number in range(self.count)]
        return [math.ceil(each / self._shared) * self._row_bytes for each in rows]


def _subsampling(photometric: object, groups: Sequence[int]) -> tuple[int, int]:
    """Returns the numbers of columns and rows of a group of pixels that share their colours. ``groups``: what the
    file says. Most files that say nothing have no groups, although the standard's default is 2 and 2."""
    named = photometric == _YCBCR and len(groups) == 2 and {*groups} <= {1, 2, 4}
    return (groups[0], groups[1]) if named else (1, 1)


# Kinds of greys of a TIFF that Pillow reads in one byte order only, or whose 0 is white, with the image's mode and
# the mode of the data. A key has the byte order, the kind of grey, the kind of numbers, the order of bits, and the
# bits of each sample.
LAYOUTS = {
    (order, zero, (numbers,), 1, (bits,), ()): (mode, stored)
    for zero in (0, 1)
    for order, numbers, bits, mode, stored in (
        (b"MM", 1, 12, "I;16", "I;12"),
        (b"II", 1, 12, "I;16", "I;12"),
        (b"MM", 1, 16, "I;16B", "I;16B"),
        (b"MM", 1, 32, "I", "I;32B"),
        (b"II", 1, 32, "I", "I;32N"),
        (b"MM", 3, 64, "F", "F;64BF"),
        (b"II", 3, 64, "F", "F;64F"),
    )
}
# Pillow reads these signed numbers as unsigned ones.
LAYOUTS |= {(order, 1, (2,), 1, (8,), ()): ("I", "I;8S") for order in (b"MM", b"II")}


_SETUP = threading.Lock()


def _only_libtiff_reads(tags: Any) -> bool:
    if tags.get(_PLANES, 1) == 2:
        return max(tags.get(_BITS, (1,))) == 16 or 1 in tags.get(_EXTRA, ())
    return max(_subsampling(tags.get(_PHOTOMETRIC), tags.get(_SUBSAMPLING, ()))) > 1


def mend_tiles(image: Any, plugin: Any) -> None:
    """Corrects how Pillow unpacks the numbers of a TIFF.

    libtiff returns numbers in the machine's byte order. Pillow knows this only for unsigned numbers of 16 bits.
    libtiff also reads two things that Pillow's own decoder cannot read: YCbCr in groups of pixels, and separate
    planes of 16 bits or of colours that are multiplied with the alpha.
    """
    tags, tile = image.tag_v2, image.tile[0]
    if tile.codec_name == "libtiff":
        stored, *others = tile.args
        if stored.startswith(("I;", "F;")):
            image.tile = [tile._replace(args=(stored.replace("B", "N"), *others))]
    elif _only_libtiff_reads(tags):
        with _SETUP:
            plugin.READ_LIBTIFF = True
            try:
                image._setup()
            finally:
                plugin.READ_LIBTIFF = False
