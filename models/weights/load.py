"""Loads tensors onto the device, in the order the regions take them: of a checkpoint, or of prepared weights.

Prepared weights are a mapped file, for which this module also lays weights out.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.errors import WeightsError
from snapcap.models.layers.linear import quantised
from snapcap.models.layers.weights import NamedWeights, WeightSource, in_order
from snapcap.models.processing.transform import Normalisation
from snapcap.models.regions.table import Weights, build_regions, layers_of
from snapcap.models.weights.prepared import (
    ALIGNMENT,
    CHUNK_BYTES,
    Header,
    MappedWeights,
    PreparedTensor,
    chunk_count,
    write_header,
)
from snapcap.models.weights.read import read_tensors, upload

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def load_weights(
    folder: Path,
    config: ModelConfig,
    normalisation: Normalisation,
    device: torch.device,
    dtype: torch.dtype,
    layout: str | None = None,
) -> Weights[Tensor]:
    """Reads a checkpoint folder (safetensors or ``.bin``, one file or sharded) into region weights.

    A tensor that is missing, left over, or of another shape is an error that names it.

    Args:
        dtype: the dtype of the weights; statistics of pixels and rotary frequencies are fp32. In int8, the weights
            of linear layers are as `models.layers.linear.quantised` returns them, and all others are fp32.
        layout: the type of the device that will read the weights, cpu or cuda. None is the type of ``device``.

    Raises:
        WeightsError: the files cannot be read or do not fit the configuration.
    """
    tensors = read_tensors(folder)
    theirs = _distinct(tensors, config)
    take = WeightSource(
        upload({ours: tensors[name] for ours, name in theirs.items()}, device),
        theirs,
        config.names,
        device,
        dtype,
        layout or device.type,
        tied_head=config.decoder.tied_head,
        normalisation=normalisation,
    )
    named = {**layers_of(config.vision).weights(take, config), **layers_of(config.decoder).weights(take, config)}
    prepare = _quantised() if take.quantises else lambda layer: layer
    sets = {
        name: tuple(in_order(region.function, prepare(each)) for each in named.get(name, [{}]))
        for name, region in {region.weights_name: region for region in build_regions(config)}.items()
    }
    take.finish()
    return Weights(sets)


# The weights [out, in] of linear layers, by the end of a parameter's name. The patches' embedding stays in fp32,
# because it is small and reads pixels.
_LINEAR = re.compile(r"(?:^|_)(?:qkv|kv|out|cross_q|cross_out|fc1|fc2|gate_up|down|projection|dense|head)_weight$")


def _quantised() -> Callable[[NamedWeights], NamedWeights]:
    """Returns a function that rounds the linear layers among a region's weights to int8. A tensor that several
    regions have stays one tensor."""
    found: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def convert(name: str, weight: Tensor) -> Tensor:
        # Steps are read as whole fp32 numbers.
        if weight.dim() != 2 or weight.numel() % 4 or not _LINEAR.search(name):
            return weight
        same = weight.data_ptr(), weight.shape, weight.stride()
        if weight.is_meta or same not in found:
            found[same] = weight, quantised(weight)  # the weight is kept, so that no other has its address
        return found[same][1]

    return lambda layer: {name: convert(name, weight) for name, weight in layer.items()}


def _distinct(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, str]:
    """Returns the checkpoint's name of each tensor, by snapcap's name. Raises WeightsError if two different tensors
    have the same name in snapcap, such as with and without a prefix, or a tensor belongs to an adapter."""
    theirs: dict[str, str] = {}
    for name, ours in config.names.canonical(tensors).items():
        if ".lora_" in name or ".base_layer." in name:
            raise WeightsError(
                f"the checkpoint has tensors of a PEFT adapter, such as {name!r}; save the model anew after "
                "merge_and_unload()"
            )
        other = theirs.setdefault(ours, name)
        one, two = tensors[other], tensors[name]
        if one is not two and not (one.dtype == two.dtype and torch.equal(one, two)):
            raise WeightsError(f"the checkpoint has {other!r} and {name!r}, which are one tensor, and they differ")
    return theirs


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
    described: dict[str, PreparedTensor] = {}
    tensors: list[Tensor] = []
    names: dict[tuple[object, ...], str] = {}
    size = 0

    def place(tensor: Tensor, name: str) -> str:
        """Places a tensor behind the others, unless it is placed already. Returns its name in the file."""
        nonlocal size
        same = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if same not in names:
            offset = size + -size % ALIGNMENT
            placed = PreparedTensor(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)
            names[same], described[name] = name, placed
            tensors.append(tensor)
            size = offset + placed.nbytes
        return names[same]

    regions = {
        region: tuple(
            tuple(place(tensor, f"{region}.{number}.{index}") for index, tensor in enumerate(layer))
            for number, layer in enumerate(layers)
        )
        for region, layers in weights.sets.items()
    }
    unknown = ("0" * 64,) * chunk_count(size)
    return Contents(Header(key, described, regions, size, unknown), tuple(tensors))


def _bytes(tensor: Tensor) -> memoryview:
    """Returns the tensor's memory, in memory order."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda each: (-strides[each], each))
    lying = tensor.detach().permute(order)
    if not lying.is_contiguous():
        raise ValueError(f"a weight of shape {tuple(tensor.shape)} has holes: {strides}")
    return lying.reshape(-1).view(torch.uint8).numpy().data
