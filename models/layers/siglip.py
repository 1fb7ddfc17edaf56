"""Computes and loads SigLIP's encoder (Zhai et al., 2023), which has no class token. Its blocks are `layers.vit`'s.

B is the padded batch, S the patches, E the encoder's width.
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import SiglipConfig
from snapcap.models.layers import vit
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource


def embed(
    pixels: Tensor,  # [B, height, width, 3] uint8
    /,
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    patch_weight: Tensor,  # [E, 3 * patch height * patch width]
    patch_bias: Tensor,  # [E]
    position: Tensor,  # [1, S, E]
    *,
    grid: tuple[int, int],
    patch_size: tuple[int, int],
) -> Tensor:  # [B, S, E]
    """Normalises the image in fp32, cuts it into patches and embeds them."""
    patches = vit.cut(pixels, rescale, mean, std, grid, patch_size).to(patch_weight.dtype)
    return F.linear(patches, patch_weight, patch_bias) + position


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the encoder's regions."""
    vision = config.vision
    return {
        **vit.regions(config),
        "encoder_before": partial(embed, grid=vision.grid, patch_size=vision.patch_size),
    }


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the encoder's regions."""
    vision = cast(SiglipConfig, config.vision)
    length, width = vision.output_shape
    position = take.raw("encoder.position", length, width)
    if vision.bucketed:
        position = position[bucketed_positions(vision.grid)]
    before = {
        "patch_bias": take("encoder.patch.bias", width),
        **vit.weights_of_patches(take, vision),
        "position": take.place(position.view(1, length, width)),
    }
    return {"encoder_before": [before], "encoder_block": vit.weights_of_blocks(take, vision)}


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
