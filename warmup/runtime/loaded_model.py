"""Loads a checkpoint onto the device: regions, weights and buffers, which compiled code is checked with too."""

import logging
from pathlib import Path

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.memory.torch_memory import torch_memory
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.state.kv_cache import DecodeState
from snapcap.models.regions.table import Regions, build_regions
from snapcap.models.weights.load import Normalisation, load_weights
from snapcap.models.weights.prepared.mapped import MappedWeights
from snapcap.models.weights.prepared.tensors import prepared_weights
from snapcap.models.weights.sets import Weights
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.runtime.model import Model, check_weights

_logger = logging.getLogger("snapcap.weights")


class LoadedModel(Model[Tensor]):
    """A model of torch's tensors."""

    @property
    def device(self) -> torch.device:
        return self.state.tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and caches."""
        return self.state.key.dtype


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
    slots, memory = plan.table.largest.size, torch_memory(device)
    state = DecodeState.allocate(config, slots, plan.cache_length, memory, str(dtype).removeprefix("torch."))
    return LoadedModel(config, regions, weights, state, found is not None)


def _prepared(mapped: MappedWeights, regions: Regions, device: torch.device) -> Weights[Tensor] | None:
    """None where they cannot be used: the checkpoint has them too."""
    try:
        check_weights(mapped, regions)
        return prepared_weights(mapped, device)
    except Exception:
        _logger.exception("prepared weights are not used; the checkpoint is read")
        return None
