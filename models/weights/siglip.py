"""Arranges SigLIP's tensors before and after its blocks, which are ``weights.vit``'s, as its regions take them."""

import torch
from torch import Tensor

from snapcap.models.dimensions import SiglipConfig
from snapcap.models.weights.source import WeightSet, WeightSource
from snapcap.models.weights.vit import Normalisation, patch


def embed(take: WeightSource, vision: SiglipConfig, normalisation: Normalisation) -> WeightSet:
    """For ``siglip.embed``."""
    length, width = vision.output_shape
    position = take.raw("encoder.position", length, width)
    if vision.bucketed:
        position = position[bucketed_positions(vision.grid)]
    bias = take("encoder.patch.bias", width)
    return *patch(take, vision, normalisation), bias, take.place(position.view(1, length, width))


def projection(take: WeightSource, vision: SiglipConfig, width: int) -> WeightSet:
    """For ``siglip.project``; ``width`` is the decoder's."""
    inputs = vision.pixel_shuffle**2 * vision.hidden_size
    return *take.affine("encoder.norm", vision.hidden_size), take("projection", width, inputs)


def bucketed_positions(grid: tuple[int, int]) -> Tensor:
    """[patches] int64: the row of the position table for each patch of a whole image, as transformers looks it up.

    By fractions of a side in fp32, whose rounding gives two patches one position at some numbers of patches, such
    as 25 or 29 a side: the tables were trained so.
    """
    down, across = (
        torch.bucketize(
            (torch.arange(count).float() * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6),
            torch.arange(1 / count, 1.0, 1 / count),
            right=True,
        )
        for count in grid
    )
    return (down[:, None] * grid[0] + across[None, :]).flatten()
