"""Arranges a DaViT encoder's tensors in the order its regions take them."""

from snapcap.models.dimensions import DavitConfig, DavitStage
from snapcap.models.regions.names import stage as stage_regions
from snapcap.models.weights.source import WeightSet, WeightSource
from snapcap.models.weights.vit import Normalisation, statistics


def stages(
    take: WeightSource, vision: DavitConfig, normalisation: Normalisation
) -> dict[str, tuple[WeightSet, ...]]:
    """For ``davit.embed_pixels``, ``davit.embed`` and ``davit.block``, by region."""
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
    normed = stage.input_size if stage.norm_first else stage.hidden_size
    shape = stage.hidden_size, stage.input_size, stage.kernel, stage.kernel
    return *take.affine(f"{name}.conv", *shape), *take.affine(f"{name}.norm", normed)


def _block(take: WeightSource, stage: DavitStage, name: str) -> WeightSet:
    return *_half(take, stage, f"{name}.spatial"), *_half(take, stage, f"{name}.channel")


def _half(take: WeightSource, stage: DavitStage, name: str) -> WeightSet:
    width, inner = stage.hidden_size, stage.inner_size
    return (
        *take.affine(f"{name}.conv1", width, 1, 3, 3),
        *take.affine(f"{name}.norm1", width),
        *take.affine(f"{name}.qkv", 3 * width, width),
        *take.affine(f"{name}.out", width, width),
        *take.affine(f"{name}.conv2", width, 1, 3, 3),
        *take.affine(f"{name}.norm2", width),
        *take.affine(f"{name}.fc1", inner, width),
        *take.affine(f"{name}.fc2", width, inner),
    )
