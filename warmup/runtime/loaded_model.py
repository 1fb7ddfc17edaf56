"""Loads a checkpoint onto the device: regions, weights and buffers, which compiled code is checked with too."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.state.kv_cache import DecodeState
from snapcap.models.regions.table import Region, Regions, build_regions, region_inputs
from snapcap.models.weights.load import Normalisation, Weights, load_weights
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.plan.plan import Plan


@dataclass(frozen=True)
class LoadedModel:
    """Regions, weights and one set of static buffers."""

    config: ModelConfig
    regions: Regions
    weights: Weights
    state: DecodeState
    dtype: torch.dtype

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
) -> LoadedModel:
    """Read the weights of a checkpoint folder and allocate the buffers of the plan.

    Raises:
        WeightsError: the weights cannot be read or do not fit the configuration.
    """
    normalisation = Normalisation(transform.effective_rescale, transform.effective_mean, transform.effective_std)
    weights = load_weights(folder, config, normalisation, device, dtype)
    state = DecodeState.allocate(config, plan.table.largest.size, plan.cache_length, device, dtype)
    return LoadedModel(config, build_regions(config), weights, state, dtype)
