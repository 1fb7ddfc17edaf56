"""Arranges the tensors between LLaVA's encoder and its decoder as their region takes them."""

import torch

from snapcap.models.dimensions import LlavaConfig
from snapcap.models.weights.source import WeightSet, WeightSource


def projection(take: WeightSource, decoder: LlavaConfig, inputs: int) -> WeightSet:
    """For ``llava.project``; ``inputs`` is the encoder's width. Without a bias the region adds zeros."""
    width = decoder.hidden_size
    if decoder.projector_bias:
        return *take.affine("projection1", width, inputs), *take.affine("projection2", width, width)
    nothing = take.place(torch.zeros(width))
    return take("projection1.weight", width, inputs), nothing, take("projection2.weight", width, width), nothing
