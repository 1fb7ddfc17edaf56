"""Makes the weights of regions over a mapped file of prepared weights, and lays weights out for such a file."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from snapcap.models.dataclass import dataclass
from snapcap.models.regions.table import Weights
from snapcap.models.weights.prepared import (
    ALIGNMENT,
    CHUNK_BYTES,
    Header,
    MappedWeights,
    PreparedTensor,
    chunk_count,
    write_header,
)
from snapcap.models.weights.read import upload

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8}


def prepared_weights(mapped: MappedWeights, device: torch.device) -> Weights[Tensor]:
    """Returns the weights of a file. For a CPU they are the file's own pages.

    On CUDA they share one allocation, in which each begins at a multiple of 256 bytes.
    """
    memory = torch.frombuffer(mapped.memory, dtype=torch.uint8, offset=mapped.begin)
    placed = upload({"all": memory}, device)["all"]
    tensors = {
        name: placed[tensor.offset : tensor.offset + tensor.nbytes]
        .view(DTYPES[tensor.dtype])
        .as_strided(tensor.shape, tensor.strides)
        for name, tensor in mapped.header.tensors.items()
    }
    return Weights.of_names(mapped.header.regions, tensors)


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Contents:
    """A header and its tensors, which are on the CPU and in the order of the file."""

    header: Header
    tensors: tuple[Tensor, ...]

    def chunks(self) -> Iterator[bytes]:
        """Yields the bytes of all tensors and the padding between them, ``CHUNK_BYTES`` at a time."""
        chunk = bytearray()
        for tensor in self.tensors:
            # Complete chunks are removed, and a chunk's length is a multiple of ALIGNMENT.
            chunk += bytes(-len(chunk) % ALIGNMENT)
            memory = _bytes(tensor)
            for start in range(0, len(memory), CHUNK_BYTES):
                chunk += memory[start : start + CHUNK_BYTES]
                while len(chunk) >= CHUNK_BYTES:
                    yield bytes(chunk[:CHUNK_BYTES])
                    del chunk[:CHUNK_BYTES]
        if chunk:
            yield bytes(chunk)

    def header_bytes(self, digests: list[str] | None = None) -> bytes:
        """Returns the header's bytes. Without ``digests``, which are known last, the length is the same."""
        return write_header(self.header if digests is None else replace(self.header, chunks=tuple(digests)))


def lay_out(weights: Weights[Tensor], key: str) -> Contents:
    """Describes weights that are on the CPU. A tensor that several layers or regions share is in the file once."""
    row = _Row()
    regions = {
        region: tuple(
            tuple(row.place(tensor, f"{region}.{number}.{place}") for place, tensor in enumerate(layer))
            for number, layer in enumerate(layers)
        )
        for region, layers in weights.sets.items()
    }
    unknown = ("0" * 64,) * chunk_count(row.size)
    return Contents(Header(key, row.described, regions, row.size, unknown), tuple(row.tensors))


class _Row:
    """Places tensors one after the other, each once."""

    def __init__(self) -> None:
        self.described: dict[str, PreparedTensor] = {}
        self.tensors: list[Tensor] = []
        self.size = 0
        self._names: dict[tuple[object, ...], str] = {}

    def place(self, tensor: Tensor, name: str) -> str:
        """Places a tensor at the end, unless it is placed already. Returns its name in the file."""
        same = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if same not in self._names:
            offset = self.size + -self.size % ALIGNMENT
            described = PreparedTensor(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)
            self._names[same], self.described[name] = name, described
            self.tensors.append(tensor)
            self.size = offset + described.nbytes
        return self._names[same]


def _bytes(tensor: Tensor) -> memoryview:
    """Returns the tensor's memory, in memory order."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda each: (-strides[each], each))
    lying = tensor.detach().permute(order)
    if not lying.is_contiguous():
        raise ValueError(f"a weight of shape {tuple(tensor.shape)} has holes: {strides}")
    return lying.reshape(-1).view(torch.uint8).numpy().data
