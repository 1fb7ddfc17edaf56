"""Checkpoint tensors -> the weights of each region, on the device, in the order the regions take them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint_file import WeightsError, read_tensors
from models.config import ModelConfig
from models.layouts import canonical_names
from models.regions import Region, build_regions

WeightSet = tuple[Tensor, ...]


@dataclass(frozen=True)
class Normalisation:
    """What the image processor does to a pixel value x: (x * rescale - mean) / std, per channel."""

    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Weights:
    """For each region name, one tuple of tensors per layer, in ``Region.weight_names`` order."""

    sets: Mapping[str, tuple[WeightSet, ...]]

    def of(self, region: Region) -> tuple[WeightSet, ...]:
        return self.sets[region.name]

    @property
    def nbytes(self) -> int:
        """Bytes on the device; a tied tensor counts once."""
        unique = {t.data_ptr(): t.nbytes for layers in self.sets.values() for weights in layers for t in weights}
        return sum(unique.values())


def load_weights(
    folder: Path,
    config: ModelConfig,
    normalisation: Normalisation,
    device: torch.device,
    dtype: torch.dtype,
) -> Weights:
    """Read a checkpoint folder (safetensors or ``.bin``, one file or sharded) into region weights.

    Strict: a tensor that is missing, left over, or of another shape is an error that names it.

    Raises:
        WeightsError: the files cannot be read or do not fit the configuration.
    """
    tensors = canonical_names(read_tensors(folder))
    source = _Source(tensors, device, dtype)
    sets = _assemble(source, config, normalisation)
    source.finish()
    return Weights(sets)


class _Source:
    """Hands tensors out by name, checked and converted, and remembers which were asked for."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._left = set(tensors)
        self._device = device
        self._dtype = dtype

    def has(self, name: str) -> bool:
        return name in self._tensors

    def raw(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise WeightsError(f"the checkpoint has no tensor {name!r}; is it a ViT + GPT-2 captioner?")
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"tensor {name!r} has shape {tuple(tensor.shape)}, config.json implies {shape}")
        self._left.discard(name)
        return tensor

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(device=self._device, dtype=dtype or self._dtype).contiguous()

    def __call__(self, name: str, *shape: int) -> Tensor:
        return self.place(self.raw(name, *shape))

    def finish(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left)[:5])
            raise WeightsError(f"the checkpoint holds {len(self._left)} tensors that no region uses: {names}")


def _assemble(take: _Source, config: ModelConfig, normalisation: Normalisation) -> dict[str, tuple[WeightSet, ...]]:
    decoder = config.decoder
    builders: dict[str, Callable[[int], WeightSet]] = {
        "encoder_before": lambda _: _vit_embed(take, config, normalisation),
        "encoder_block": lambda layer: _vit_block(take, config, layer),
        "encoder_after": lambda _: _cross_kv(take, config),
        "decoder_before": lambda _: (
            take("decoder.wte.weight", decoder.vocab_size, decoder.hidden_size),
            take("decoder.wpe.weight", decoder.n_positions, decoder.hidden_size),
        ),
        "decoder_block": lambda layer: _gpt2_block(take, config, layer),
    }
    regions = build_regions(config)
    sets = {
        region.name: tuple(builders[region.name](layer) for layer in range(region.layers))
        for region in regions
        if region.name in builders
    }
    # A tied checkpoint may hold the head as well; the embedding is the one copy kept on the device.
    head = sets["decoder_before"][0][0]
    if take.has("decoder.lm_head.weight"):
        own = take.raw("decoder.lm_head.weight", decoder.vocab_size, decoder.hidden_size)
        head = head if decoder.tied_head else take.place(own)
    elif not decoder.tied_head:
        raise WeightsError("the checkpoint has no decoder.lm_head.weight, and tie_word_embeddings is false")
    norm = (take("decoder.ln_f.weight", decoder.hidden_size), take("decoder.ln_f.bias", decoder.hidden_size))
    sets["decoder_after"] = ((*norm, head),)
    return sets


def _vit_embed(take: _Source, config: ModelConfig, normalisation: Normalisation) -> WeightSet:
    vision = config.vision
    width, (height, breadth) = vision.hidden_size, vision.patch_size
    patch = take.raw("encoder.patch.weight", width, 3, height, breadth).reshape(width, 3 * height * breadth)
    statistics = (
        take.place(torch.tensor(values), torch.float32)
        for values in ([normalisation.rescale], normalisation.mean, normalisation.std)
    )
    return (
        *statistics,
        take.place(patch),
        take("encoder.patch.bias", width),
        take("encoder.class_token", 1, 1, width),
        take("encoder.position", 1, vision.sequence_length, width),
    )


def _vit_block(take: _Source, config: ModelConfig, layer: int) -> WeightSet:
    vision, name = config.vision, f"encoder.layer.{layer}"
    width, inner = vision.hidden_size, vision.intermediate_size
    projections = ("query", "key", "value")
    qkv = torch.cat([take.raw(f"{name}.{p}.weight", width, width) for p in projections])
    # Without qkv_bias the region adds zeros: one region for both, and the sum is exact.
    biases = (
        torch.cat([take.raw(f"{name}.{p}.bias", width) for p in projections])
        if vision.qkv_bias
        else torch.zeros(3 * width)
    )
    return (
        take(f"{name}.norm1.weight", width),
        take(f"{name}.norm1.bias", width),
        take.place(qkv),
        take.place(biases),
        take(f"{name}.out.weight", width, width),
        take(f"{name}.out.bias", width),
        take(f"{name}.norm2.weight", width),
        take(f"{name}.norm2.bias", width),
        take(f"{name}.fc1.weight", inner, width),
        take(f"{name}.fc1.bias", inner),
        take(f"{name}.fc2.weight", width, inner),
        take(f"{name}.fc2.bias", width),
    )


def _cross_kv(take: _Source, config: ModelConfig) -> WeightSet:
    outer, width, layers = config.vision.hidden_size, config.decoder.hidden_size, config.decoder.num_layers
    names = [f"decoder.h.{layer}.crossattention.c_attn" for layer in range(layers)]
    weight = torch.cat([take.raw(f"{name}.weight", width, 2 * width).t() for name in names])
    bias = torch.cat([take.raw(f"{name}.bias", 2 * width) for name in names])
    projection = (
        (take("projection.weight", width, outer), take("projection.bias", width)) if config.projected else ()
    )
    norm = (take("encoder.norm.weight", outer), take("encoder.norm.bias", outer))
    return (*norm, take.place(weight), take.place(bias), *projection)


def _gpt2_block(take: _Source, config: ModelConfig, layer: int) -> WeightSet:
    width, inner, name = config.decoder.hidden_size, config.decoder.inner_size, f"decoder.h.{layer}"

    def norm(part: str) -> WeightSet:
        return take(f"{name}.{part}.weight", width), take(f"{name}.{part}.bias", width)

    def linear(part: str, inputs: int, outputs: int) -> WeightSet:
        return take(f"{name}.{part}.weight", inputs, outputs), take(f"{name}.{part}.bias", outputs)

    return (
        *norm("ln_1"),
        *linear("attn.c_attn", width, 3 * width),
        *linear("attn.c_proj", width, width),
        *norm("ln_cross_attn"),
        *linear("crossattention.q_attn", width, width),
        *linear("crossattention.c_proj", width, width),
        *norm("ln_2"),
        *linear("mlp.c_fc", width, inner),
        *linear("mlp.c_proj", inner, width),
    )
