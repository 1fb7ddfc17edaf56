"""Loads a checkpoint's tensors onto the device, in the order the regions take them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.errors import WeightsError
from snapcap.models.layers.weights import Normalisation, WeightSource, in_order
from snapcap.models.regions.table import Weights, build_regions, layers_of
from snapcap.models.weights.read import read_tensors, upload


def weight_bytes(weights: Weights[Tensor]) -> int:
    """Returns the bytes of all weights on the device. A tied tensor counts once."""
    unique = {t.data_ptr(): t.nbytes for layers in weights.sets.values() for layer in layers for t in layer}
    return sum(unique.values())


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
        dtype: the dtype of the weights; statistics of pixels and rotary frequencies are fp32.
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
    sets = {
        region.name: tuple(in_order(region.function, each) for each in named.get(region.name, [{}]))
        for region in build_regions(config)
    }
    take.finish()
    return Weights(sets)


def _distinct(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, str]:
    """Returns the checkpoint's name of each tensor, by snapcap's name.

    Raises:
        WeightsError: two different tensors have the same name in snapcap, such as with and without a prefix, or a
            tensor belongs to an adapter.
    """
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
