"""Arranges a DaViT encoder's tensors in the order its regions take them."""

import torch.nn.functional as F

from snapcap.models.dimensions import DavitConfig, DavitStage
from snapcap.models.regions.names import stage as stage_regions
from snapcap.models.weights.source import WeightSet, WeightSource
from snapcap.models.weights.vit import Normalisation, statistics

# Rows of weights are padded to this many features: 16 bytes of a 16-bit dtype. Unaligned rows would give a GPU
# slower matrix products.
_ALIGNED = 8


def stages(
    take: WeightSource, vision: DavitConfig, normalisation: Normalisation
) -> dict[str, tuple[WeightSet, ...]]:
    """Returns the weights of ``davit.embed_pixels``, ``davit.embed`` and ``davit.block``, by region."""
    sets: dict[str, tuple[WeightSet, ...]] = {}
    for index, stage in enumerate(vision.stages):
        before, block = stage_regions(index + 1)
        first = () if sets else statistics(take, normalisation)
        name = f"encoder.stage.{index}"
        sets[before] = ((*first, *_embed(take, stage, name)),)
        layers = range(stage.num_layers)
        sets[block] = tuple(_block(take, stage, f"{name}.layer.{layer}") for layer in layers)
    return sets


def _embed(take: WeightSource, stage: DavitStage, name: str) -> WeightSet:
    """Returns an embedding's weights, one row for each feature: by place under the kernel, then channel, then
    zeros up to an aligned end."""
    weight = take.raw(f"{name}.conv.weight", stage.hidden_size, stage.input_size, stage.kernel, stage.kernel)
    weight = weight.permute(0, 2, 3, 1).flatten(1)
    weight = F.pad(weight, (0, -weight.shape[1] % _ALIGNED))
    normed = stage.input_size if stage.norm_first else stage.hidden_size
    return take.place(weight), take(f"{name}.conv.bias", stage.hidden_size), *take.affine(f"{name}.norm", normed)


def _block(take: WeightSource, stage: DavitStage, name: str) -> WeightSet:
    return *_half(take, stage, f"{name}.spatial"), *_half(take, stage, f"{name}.channel")


def _half(take: WeightSource, stage: DavitStage, name: str) -> WeightSet:
    width, inner = stage.hidden_size, stage.inner_size
    return (
        *_depthwise(take, f"{name}.conv1", width),
        *take.affine(f"{name}.norm1", width),
        *take.affine(f"{name}.qkv", 3 * width, width),
        *take.affine(f"{name}.out", width, width),
        *_depthwise(take, f"{name}.conv2", width),
        *take.affine(f"{name}.norm2", width),
        *take.affine(f"{name}.fc1", inner, width),
        *take.affine(f"{name}.fc2", width, inner),
    )


def _depthwise(take: WeightSource, name: str, width: int) -> WeightSet:
    """Returns a depthwise convolution's weights with channels last, as tokens have them."""
    weight = take.raw(f"{name}.weight", width, 1, 3, 3).squeeze(1).permute(1, 2, 0)
    return take.place(weight), take(f"{name}.bias", width)
