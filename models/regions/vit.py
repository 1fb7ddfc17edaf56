"""Computes the ViT encoder (Dosovitskiy et al., 2020, pre-norm) with pure functions of activations and weights.

B is the padded batch, S the encoder tokens (patches and the class token), D the hidden size, H the heads. Weights
come last and in the order of `weight_names`, so one compiled block serves every layer.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions.layers.activations import Activation
from snapcap.models.regions.layers.attention import attend_all

# Takes x, weight, bias and activation. Returns the activated linear layer.
Activated = Callable[[Tensor, Tensor, Tensor, Activation], Tensor]


def embed(
    pixels: Tensor,  # [B, height, width, 3] uint8
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    patch_weight: Tensor,  # [D, 3 * patch height * patch width]
    patch_bias: Tensor,  # [D]
    class_token: Tensor,  # [1, 1, D]
    position: Tensor,  # [1, S, D]
    *norm: Tensor,  # weight and bias [D] of a norm before the blocks; empty without one
    grid: tuple[int, int],
    patch_size: tuple[int, int],
    eps: float,
) -> Tensor:  # [B, S, D]
    """Normalises the image in fp32, cuts it into patches and embeds them.

    The embedding is a convolution whose stride is its kernel size. Computed as a matrix product over patches, it
    fuses better.
    """
    patches = cut(pixels, rescale, mean, std, grid, patch_size).to(patch_weight.dtype)
    tokens = F.linear(patches, patch_weight, patch_bias)
    tokens = torch.cat((class_token.expand(tokens.shape[0], -1, -1), tokens), dim=1) + position
    if not norm:
        return tokens
    weight, bias = norm
    return F.layer_norm(tokens, (tokens.shape[-1],), weight, bias, eps)


def cut(
    pixels: Tensor,  # [B, height, width, 3] uint8
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    grid: tuple[int, int],
    patch_size: tuple[int, int],
) -> Tensor:  # [B, patches, 3 * patch height * patch width] fp32
    """Returns the normalised patches of an image."""
    (rows, columns), (height, width) = grid, patch_size
    image = (pixels[:, : rows * height, : columns * width].to(torch.float32) * rescale - mean) / std
    patches = image.reshape(-1, rows, height, columns, width, 3).permute(0, 1, 3, 5, 2, 4)
    return patches.reshape(-1, rows * columns, 3 * height * width)


def activated(
    x: Tensor,  # [B, S, in]
    weight: Tensor,  # [out, in]
    bias: Tensor,  # [out]
    act: Activation,
) -> Tensor:  # [B, S, out]
    """Computes a linear layer and the activation after it."""
    return act(F.linear(x, weight, bias))


def block(
    hidden: Tensor,  # [B, S, D]
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    relative: Tensor | None = None,  # [1, H, S, S], added to the score of each pair of tokens
    *,
    num_heads: int,
    eps: float,
    act: Activation,
    activated: Activated = activated,
) -> Tensor:  # [B, S, D]
    """Computes one pre-norm transformer layer: attention over all tokens, then the MLP, each added to its input.

    BEiT's layer (Bao et al., 2021) also has a bias for each pair of positions, ``relative``. Its layer scale needs
    no code, because it is multiplied into the weights.
    """
    batch, length, width = hidden.shape
    normed = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    qkv = F.linear(normed, qkv_weight, qkv_bias).view(batch, length, 3, num_heads, width // num_heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, S, D/H]
    if relative is None:
        attended = attend_all(query, key, value)
    else:
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=relative)
    attended = attended.transpose(1, 2).reshape(batch, length, width)
    hidden = hidden + F.linear(attended, out_weight, out_bias)
    normed = F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)
    return hidden + F.linear(activated(normed, fc1_weight, fc1_bias, act), fc2_weight, fc2_bias)
