"""Arranges the tensors of SigLIP's regions before and after its blocks. ``weights.vit`` arranges the blocks."""

import torch
from torch import Tensor

from snapcap.models.dimensions import SiglipConfig
from snapcap.models.weights.source import WeightSet, WeightSource
from snapcap.models.weights.vit import Normalisation, patch


def embed(take: WeightSource, vision: SiglipConfig, normalisation: Normalisation) -> WeightSet:
    """Returns the weights of ``siglip.embed``."""
    length, width = vision.output_shape
    position = take.raw("encoder.position", length, width)
    if vision.bucketed:
        position = position[bucketed_positions(vision.grid)]
    bias = take("encoder.patch.bias", width)
    return *patch(take, vision, normalisation), bias, take.place(position.view(1, length, width))


def projection(take: WeightSource, vision: SiglipConfig, width: int) -> WeightSet:
    """Returns the weights of ``siglip.project``. ``width`` is the decoder's."""
    inputs = vision.pixel_shuffle**2 * vision.hidden_size
    return *take.affine("encoder.norm", vision.hidden_size), take("projection", width, inputs)


def bucketed_positions(grid: tuple[int, int]) -> Tensor:
    """Returns the row of the position table for each patch of a whole image, as transformers does: [patches]
    int64.

    Rows are found by fractions of a side in fp32. At some numbers of patches, such as 25 or 29 a side, rounding
    gives two patches one position. The tables were trained with these positions.
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
