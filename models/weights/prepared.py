"""Describes a file of prepared weights in its header, checks a header, and maps the file. Imports no torch.

    8 bytes, little endian   N
    N bytes                  the header, in JSON, then spaces up to a whole page
    the rest                 tensors; each begins at a multiple of 256 bytes

The file is a safetensors file, which other tools read too. The format allows no gaps, so the padding between two
tensors is a tensor too, ``padding.N``. snapcap's own fields are in ``__metadata__``:

    digest    SHA-256, in hex, of all N bytes, with 64 zeros in place of the digest
    key       names the weights' sources and layout
    regions   for each region and layer the names of its tensors; a tied one is named twice
    views     shape and strides, in elements, of tensors that are not row-major; they are stored in memory order
    chunks    SHA-256, in hex, of every 4 MiB of tensors, one after the other

No field of a header is trusted: each tensor must lie within the file, and overlap no other.
"""

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

from snapcap.models.dataclass import dataclass
from snapcap.models.json_object import load_object
from snapcap.models.memory.memory import row_major

FORMAT = "snapcap prepared weights 1"
ALIGNMENT = 256  # bytes; the alignment of a GPU's widest loads and of a CPU's vectors
CHUNK_BYTES = 4 << 20
MAX_HEADER_BYTES = 2 << 20  # a model of 100 layers needs two fifths of it
MAX_DIMENSIONS = 8
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}

_PAGE = 4096
_METADATA = "__metadata__"
_FIELDS = {"digest", "format", "key", "regions", "views", "chunks"}
_PADDING = "padding."
_DIGEST = 64  # characters
_MARK = b'"digest":"'  # in front of the header's digest; inside a JSON string the quotes would be escaped
Layers = tuple[tuple[str, ...], ...]


class PreparedError(ValueError):
    """An invalid file of prepared weights. The message is one line that says what is wrong."""


@dataclass(frozen=True)
class PreparedTensor:
    """The place of a dense tensor in the file.

    ``offset`` is in bytes from the first tensor on, ``strides`` in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Returns the shape, with its dimensions in memory order, in which the tensor is row-major."""
        order = sorted(range(len(self.shape)), key=lambda each: (-self.strides[each], each))
        return tuple(self.shape[each] for each in order)


@dataclass(frozen=True)
class Header:
    """The header of a file of prepared weights.

    key: names the weights' sources and layout.
    regions: for each region and layer the names of its tensors, in the region's order.
    size: bytes of all tensors, with padding.
    chunks: SHA-256 of each ``CHUNK_BYTES`` of tensors, in hex.
    """

    key: str
    tensors: Mapping[str, PreparedTensor]
    regions: Mapping[str, Layers]
    size: int
    chunks: tuple[str, ...]


def chunk_count(size: int) -> int:
    """Returns the number of chunks in ``size`` bytes of tensors."""
    return -(-size // CHUNK_BYTES)


def write_header(header: Header) -> bytes:
    """Returns the bytes before the first tensor. Their number does not depend on the digests."""
    described: dict[str, Any] = {_METADATA: _metadata(header)}
    end = 0
    for number, (name, tensor) in enumerate(sorted(header.tensors.items(), key=lambda pair: pair[1].offset)):
        if tensor.offset > end:
            described[f"{_PADDING}{number}"] = _entry("U8", (tensor.offset - end,), end, tensor.offset)
        end = tensor.offset + tensor.nbytes
        described[name] = _entry(tensor.dtype, tensor.stored_shape, tensor.offset, end)
    text = json.dumps(described, separators=(",", ":")).encode()
    length = len(text) + -(8 + len(text)) % _PAGE
    return length.to_bytes(8, "little") + sealed(text.ljust(length))


def sealed(header: bytes) -> bytes:
    """Returns the header with its own digest behind the mark."""
    before, mark, after = header.partition(_MARK)
    rest = after[_DIGEST:]
    digest = hashlib.sha256(before + mark + b"0" * _DIGEST + rest).hexdigest()
    return before + mark + digest.encode() + rest


def read_header(file: BinaryIO, file_size: int) -> tuple[Header, int]:
    """Returns the header of a file of ``file_size`` bytes, and the offset of its first tensor.

    Raises:
        PreparedError: the header is invalid, or does not fit the file's size.
        OSError: the file cannot be read.
    """
    length = int.from_bytes(file.read(8), "little")
    begin = 8 + length
    if not 2 <= length <= MAX_HEADER_BYTES or begin % _PAGE or begin > file_size:
        raise PreparedError("it does not begin with the length of a header")
    data = file.read(length)
    if len(data) != length:
        raise PreparedError("its header is cut off")
    if sealed(data) != data:
        raise PreparedError("its header is damaged")
    return _parse(data, file_size - begin), begin


def _metadata(header: Header) -> dict[str, str]:
    views = {
        name: [tensor.shape, tensor.strides]
        for name, tensor in header.tensors.items()
        if tensor.strides != row_major(tensor.shape)
    }
    return {
        "digest": "0" * _DIGEST,
        "format": FORMAT,
        "key": header.key,
        "regions": json.dumps(header.regions, separators=(",", ":")),
        "views": json.dumps(views, separators=(",", ":")),
        "chunks": "".join(header.chunks),
    }


def _entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _parse(data: bytes, size: int) -> Header:
    described = _object(data, "its header")
    metadata = described.pop(_METADATA, None)
    if not isinstance(metadata, dict) or metadata.keys() != _FIELDS:
        raise PreparedError("its metadata has other fields than it should")
    if metadata["format"] != FORMAT or not all(isinstance(text, str) for text in metadata.values()):
        raise PreparedError("its metadata is of another format")
    views = _object(metadata["views"], "its list of views")
    tensors = {name: _tensor(name, entry, views.pop(name, None)) for name, entry in described.items()}
    if views:
        raise PreparedError("it has a view of no tensor")
    _check_tiles(tensors, size)
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PADDING)}
    regions = _regions(_object(metadata["regions"], "its list of regions"), own)
    text = metadata["chunks"]
    if len(text) != _DIGEST * chunk_count(size) or not set(text) <= set("0123456789abcdef"):
        raise PreparedError("its digests are not those of its chunks")
    chunks = tuple(text[place : place + _DIGEST] for place in range(0, len(text), _DIGEST))
    return Header(metadata["key"], own, regions, size, chunks)


def _object(data: bytes | str, what: str) -> dict[str, Any]:
    try:
        return load_object(data)
    except ValueError as error:
        raise PreparedError(f"{what} {error}") from None


def _tensor(name: str, entry: Any, view: Any) -> PreparedTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(sizes), "data_offsets": [begin, end]} if len(entry) == 3:
            shape = _numbers(sizes, 1)
            if dtype in ITEM_BYTES and shape is not None and _numbers([begin, end], 0) is not None:
                tensor = PreparedTensor(dtype, shape, row_major(shape), begin)
                padding = name.startswith(_PADDING)
                known = dtype == "U8" if padding else dtype != "U8" and begin % ALIGNMENT == 0
                if known and end - begin == tensor.nbytes:
                    return tensor if view is None else _viewed(name, tensor, view)
    raise PreparedError(f"its tensor {name[:80]!r} is not described as it should be")


def _viewed(name: str, tensor: PreparedTensor, view: Any) -> PreparedTensor:
    """Returns the tensor with the shape and strides of a view, which must cover each element once."""
    match view:
        case [list(sizes), list(steps)] if len(sizes) == len(steps):
            shape, strides = _numbers(sizes, 1), _numbers(steps, 0)
            if shape is not None and strides is not None:
                viewed = PreparedTensor(tensor.dtype, shape, strides, tensor.offset)
                if viewed.stored_shape == tensor.shape and _is_dense(shape, strides):
                    return viewed
    raise PreparedError(f"its tensor {name[:80]!r} is not viewed as it should be")


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Returns whether a view covers each element once. The stride of a dimension of one element is never used."""
    covered = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != covered:
            return False
        covered *= length
    return True


def _numbers(values: list[Any], least: int) -> tuple[int, ...] | None:
    """Returns the values if they are whole numbers that can be sizes, else None."""
    if len(values) > MAX_DIMENSIONS or any(type(each) is not int or not least <= each < 1 << 48 for each in values):
        return None
    return tuple(values)


def _check_tiles(tensors: Mapping[str, PreparedTensor], size: int) -> None:
    """Checks that each tensor begins where the one before ends, and that the last one ends with the file."""
    end = 0
    for tensor in sorted(tensors.values(), key=lambda each: each.offset):
        if tensor.offset != end:
            raise PreparedError("its tensors overlap, or leave holes")
        end += tensor.nbytes
    if end != size:
        raise PreparedError(f"it has {size} bytes of tensors, its header says {end}")


def _regions(value: Mapping[str, Any], tensors: Mapping[str, PreparedTensor]) -> dict[str, Layers]:
    named: set[str] = set()
    for layers in value.values():
        if not isinstance(layers, list) or not all(isinstance(layer, list) for layer in layers):
            raise PreparedError("its regions are not lists of layers")
        for layer in layers:
            if not all(isinstance(name, str) for name in layer):
                raise PreparedError("its layers are not lists of names")
            named.update(layer)
    if not named or named != tensors.keys():
        raise PreparedError("its regions name other tensors than it has")
    return {region: tuple(map(tuple, layers)) for region, layers in value.items()}


@dataclass(frozen=True)
class MappedWeights:
    """A mapped file of prepared weights.

    ``memory`` is the whole file. Its tensors begin at ``begin``, a page boundary. The mapping is private, so
    writes never reach the file, and stays valid if the file is replaced.
    """

    header: Header
    begin: int
    memory: mmap.mmap

    def damaged_chunks(self) -> list[int]:
        """Returns the numbers of the chunks that do not match their SHA-256. Reads the whole file, so no start
        calls it."""
        with memoryview(self.memory)[self.begin :] as memory:
            chunks = (memory[start : start + CHUNK_BYTES] for start in range(0, len(memory), CHUNK_BYTES))
            digests = [hashlib.sha256(chunk).hexdigest() for chunk in chunks]
        return [number for number, digest in enumerate(self.header.chunks) if digests[number] != digest]


def map_weights(file: BinaryIO, key: str) -> MappedWeights:
    """Maps an open file if its key is ``key``.

    Raises:
        PreparedError: the file is damaged, or has another key.
        OSError: the file cannot be read or mapped.
    """
    size = os.fstat(file.fileno()).st_size
    header, begin = read_header(file, size)
    if header.key != key:
        raise PreparedError("it was made of something else than its name says")
    try:
        memory = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except ValueError:  # the file has become shorter
        raise PreparedError("it is being cut off") from None
    return MappedWeights(header, begin, memory)
