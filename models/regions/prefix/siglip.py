"""Computes the parts of SigLIP's encoder (Zhai et al., 2023) before and after its blocks.

The blocks are those of ``regions.vit``. The encoder has no class token. A token of the decoder may combine several
of the encoder's. B is the padded batch, S the patches, P the tokens of a text, E the encoder's width and D the
decoder's.
"""

import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions.prefix.llama import between
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
    """Normalises the image in fp32, cuts it into patches and embeds them."""
    patches = cut(pixels, rescale, mean, std, grid, patch_size).to(patch_weight.dtype)
    return F.linear(patches, patch_weight, patch_bias) + position


def project(
    hidden: Tensor,  # [B, S, E]
    slots: Tensor,  # [B] int64
    texts: Tensor,  # [slots + 1, P] int64
    norm_weight: Tensor,  # [E]
    norm_bias: Tensor,
    projection_weight: Tensor,  # [D, s * s * E]
    *embeddings: Tensor,  # the token embedding and the prefix that `llama.between` takes
    grid: tuple[int, int],
    pixel_shuffle: int,
    eps: float,
) -> Tensor:  # [B, n + S / (s * s) + P, D]
    """Computes the encoder's last norm, and projects each square of s × s patches to one token of the decoder.

    The tokens are put between prefix and text. The patches of a square are concatenated row by row.
    """
    normed = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    (rows, columns), side = grid, pixel_shuffle
    squares = normed.view(-1, rows // side, side, columns // side, side, normed.shape[-1])
    squares = squares.transpose(2, 3).reshape(normed.shape[0], -1, side * side * normed.shape[-1])
    return between(F.linear(squares, projection_weight), slots, texts, *embeddings)
