"""Computes what SigLIP's encoder (Zhai et al., 2023) does before and after its blocks, which are ``regions.vit``'s.

It has no class token, and several of its tokens may become one of the decoder's. B is the padded batch, S the
patches, E the encoder's width and D the decoder's.
"""

import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions.prefix.llama import after_prefix
from snapcap.models.regions.vit import cut


def embed(
    pixels: Tensor,  # [B, height, width, 3] uint8
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
    """Normalise the image in fp32, cut it into patches and embed them."""
    patches = cut(pixels, rescale, mean, std, grid, patch_size).to(patch_weight.dtype)
    return F.linear(patches, patch_weight, patch_bias) + position


def project(
    hidden: Tensor,  # [B, S, E]
    norm_weight: Tensor,  # [E]
    norm_bias: Tensor,
    projection_weight: Tensor,  # [D, s * s * E]
    *prefix: Tensor,  # [n, D], embeddings of what a chat template puts before the image, if it does
    grid: tuple[int, int],
    pixel_shuffle: int,
    eps: float,
) -> Tensor:  # [B, n + S / (s * s), D]
    """The encoder's last norm, each square of s × s patches as one token of the decoder, the prefix before them.

    A token holds its patches row by row.
    """
    normed = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    (rows, columns), side = grid, pixel_shuffle
    squares = normed.view(-1, rows // side, side, columns // side, side, normed.shape[-1])
    squares = squares.transpose(2, 3).reshape(normed.shape[0], -1, side * side * normed.shape[-1])
    return after_prefix(F.linear(squares, projection_weight), *prefix)
