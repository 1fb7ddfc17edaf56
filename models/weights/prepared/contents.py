"""Lays out weights as a file of prepared weights holds them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from snapcap.models.weights.load import Weights
from snapcap.models.weights.prepared.header import (
    ALIGNMENT,
    CHUNK_BYTES,
    Header,
    Layers,
    PreparedTensor,
    chunk_count,
    write_header,
)
from snapcap.models.weights.prepared.tensors import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Contents:
    """``tensors`` are on the CPU, in the order in which the file has them."""

    header: Header
    tensors: tuple[Tensor, ...]

    def chunks(self) -> Iterator[bytes]:
        """The bytes of all tensors and what lies between them, ``CHUNK_BYTES`` at a time."""
        chunk = bytearray()
        for tensor in self.tensors:
            chunk += bytes(-len(chunk) % ALIGNMENT)  # a chunk's length is a multiple of it
            memory = _bytes(tensor)
            for start in range(0, len(memory), CHUNK_BYTES):
                chunk += memory[start : start + CHUNK_BYTES]
                while len(chunk) >= CHUNK_BYTES:
                    yield bytes(chunk[:CHUNK_BYTES])
                    del chunk[:CHUNK_BYTES]
        if chunk:
            yield bytes(chunk)

    def header_bytes(self, digests: list[str] | None = None) -> bytes:
        """The header; the digests of the chunks are known last, and without them it is as long."""
        return write_header(self.header if digests is None else replace(self.header, chunks=tuple(digests)))


def lay_out(weights: Weights, key: str) -> Contents:
    """Describe weights that are on the CPU; a tensor that several layers or regions share is in the file once."""
    described: dict[str, PreparedTensor] = {}
    tensors: list[Tensor] = []
    names: dict[tuple[object, ...], str] = {}
    size = 0
    regions: dict[str, Layers] = {}
    for region, layers in weights.sets.items():
        listed: list[tuple[str, ...]] = []
        for number, layer in enumerate(layers):
            own = []
            for place, tensor in enumerate(layer):
                same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                if same not in names:
                    names[same] = f"{region}.{number}.{place}"
                    offset = size + -size % ALIGNMENT
                    one = PreparedTensor(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)
                    described[names[same]] = one
                    tensors.append(tensor)
                    size = offset + one.nbytes
                own.append(names[same])
            listed.append(tuple(own))
        regions[region] = tuple(listed)
    unknown = ("0" * 64,) * chunk_count(size)
    return Contents(Header(key, described, regions, size, unknown), tuple(tensors))


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory, in the order in which it lies."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda each: (-strides[each], each))
    lying = tensor.detach().permute(order)
    if not lying.is_contiguous():
        raise ValueError(f"a weight of shape {tuple(tensor.shape)} has holes: {strides}")
    return lying.reshape(-1).view(torch.uint8).numpy().data
