"""Loads a checkpoint onto the device: regions, weights and buffers, which compiled code is checked with too."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.state.kv_cache import DecodeState
from snapcap.models.regions.table import Region, Regions, build_regions, region_inputs
from snapcap.models.weights.load import Normalisation, Weights, load_weights
from snapcap.models.weights.prepared.mapped import MappedWeights
from snapcap.models.weights.prepared.tensors import prepared_weights
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.plan.plan import Plan

_logger = logging.getLogger("snapcap.weights")


@dataclass(frozen=True)
class LoadedModel:
    """Regions, weights and one set of static buffers."""

    config: ModelConfig
    regions: Regions
    weights: Weights
    state: DecodeState
    dtype: torch.dtype
    prepared: bool = False  # whether the weights are prepared ones

    def inputs(self, region: Region, bucket: Bucket) -> tuple[Tensor, ...]:
        """Everything the region takes at a bucket, with the weights of its first layer."""
        own = region_inputs(region, self.config, self.state, bucket.size, self.dtype)
        return (*own, *self.weights.of(region)[0])


def load_model(
    folder: Path,
    config: ModelConfig,
    transform: ImageTransform,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    prepared: MappedWeights | None = None,
) -> LoadedModel:
    """Read the weights of a checkpoint folder and allocate the buffers of the plan.

    Args:
        prepared: the same weights as they are wanted, if they have been prepared; then no checkpoint is read,
            unless they are not what the configuration implies.

    Raises:
        WeightsError: the weights cannot be read or do not fit the configuration.
    """
    regions = build_regions(config)
    found = None if prepared is None else _prepared(prepared, regions, device)
    if found is not None:
        weights = found
    else:
        pixels = Normalisation(transform.effective_rescale, transform.effective_mean, transform.effective_std)
        weights = load_weights(folder, config, pixels, device, dtype)
    state = DecodeState.allocate(config, plan.table.largest.size, plan.cache_length, device, dtype)
    return LoadedModel(config, regions, weights, state, dtype, found is not None)


def _prepared(mapped: MappedWeights, regions: Regions, device: torch.device) -> Weights | None:
    """None where they cannot be used: the checkpoint has them too."""
    try:
        wanted = {region.name: [len(region.weight_names)] * region.layers for region in regions}
        if {name: [len(layer) for layer in layers] for name, layers in mapped.header.regions.items()} != wanted:
            raise ValueError("they have other regions or layers than the configuration implies")
        return prepared_weights(mapped, device)
    except Exception:
        _logger.exception("prepared weights are not used; the checkpoint is read")
        return None
