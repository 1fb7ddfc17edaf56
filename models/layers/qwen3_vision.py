"""Computes and loads Qwen3-VL's encoder (Bai et al., 2025), for packed pictures of any shape.

A picture is a grid of tokens, each of 2 × 2 patches of 16 × 16 pixels. A row of the batch has as many tokens as the
bucket; those behind its own picture's are padding, which no patch attends to. All that depends on a picture's shape
is computed from its grid: interpolated positions, rotations, and which patches are padding. So one compiled region
serves pictures of every shape.

B is the padded batch, T the bucket's tokens, S = 4 * T the patches, which lie token by token, E the encoder's
width, D the decoder's, d the width of a head.
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import Qwen3VisionConfig
from snapcap.models.layers import vit
from snapcap.models.layers.attention import join_heads
from snapcap.models.layers.linear import Activation, activation, linear
from snapcap.models.layers.llama import rotate
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource

_PATCH, _MERGE = 16, 2  # pixels of a patch's side, patches of a token's side
MERGED = _MERGE**2  # patches of a token
_THETA = 10000.0


def embed(
    pixels: Tensor,  # [B, T, 1024, 3] uint8: the 32 × 32 pixels of each token
    slots: Tensor,  # [B] int64
    grids: Tensor,  # [slots + 1, 3] int64: rows and columns of tokens of each slot's picture, and a number that is
    # not read
    /,
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    patch_weight: Tensor,  # [E, 16 * 16 * 3]
    patch_bias: Tensor,  # [E]
    position: Tensor,  # [side * side, E]
    *,
    side: int,
) -> Tensor:  # [B, S, E]
    """Normalises the pixels in fp32, embeds each patch, and adds its position."""
    batch, tokens = pixels.shape[:2]
    image = (pixels.to(torch.float32) * rescale - mean) / std
    patches = image.reshape(batch, tokens, _MERGE, _PATCH, _MERGE, _PATCH, 3).transpose(3, 4)
    patches = patches.reshape(batch, tokens * MERGED, -1).to(patch_weight.dtype)
    grid = grids[slots, :2].clamp(min=1)
    places = patch_places(grid, patches.shape[1])
    return F.linear(patches, patch_weight, patch_bias) + positions(places, grid, position, side).to(patches.dtype)


def patch_places(
    grid: Tensor,  # [B, 2] int64, at least 1
    patches: int,
) -> Tensor:  # [B, S, 2] int64
    """Returns the row and the column of each patch."""
    number = torch.arange(patches, device=grid.device)
    token, columns = number // MERGED, grid[:, 1:]
    rows = token // columns * _MERGE + number // _MERGE % _MERGE
    return torch.stack((rows, token % columns * _MERGE + number % _MERGE), dim=-1)


def positions(
    places: Tensor,  # [B, S, 2] int64
    grid: Tensor,  # [B, 2] int64, at least 1
    table: Tensor,  # [side * side, E]
    side: int,
) -> Tensor:  # [B, S, E] fp32
    """Interpolates the position table bilinearly. The corner patches of a picture have the table's corners."""
    scaled = places.float() * (side - 1) / (grid * _MERGE - 1).unsqueeze(1)
    first = scaled.floor()
    (row, column), (down, across) = first.long().unbind(-1), (scaled - first).unbind(-1)
    corners = []
    for below in (0, 1):
        for beside in (0, 1):
            share = (1 - (down - below).abs()) * (1 - (across - beside).abs())
            number = (row + below).clamp(0, side - 1) * side + (column + beside).clamp(0, side - 1)
            corners.append(F.embedding(number, table).float() * share.unsqueeze(-1))
    return corners[0] + corners[1] + corners[2] + corners[3]


def block(
    hidden: Tensor,  # [B, S, E]
    slots: Tensor,  # [B] int64
    grids: Tensor,  # [slots + 1, 3] int64
    /,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    qkv_weight: Tensor,  # [3 * E, E]
    qkv_bias: Tensor,
    frequencies: Tensor,  # [2, d / 2] fp32, as `angles` takes them
    out_weight: Tensor,
    out_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    num_heads: int,
    eps: float,
    act: Activation,
) -> Tensor:  # [B, S, E]
    """Computes one pre-norm transformer layer, in which each patch sees all patches of its picture."""
    batch, length, width = hidden.shape
    grid = grids[slots, :2].clamp(min=1)
    normed = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    qkv = linear(normed, qkv_weight, qkv_bias).view(batch, length, 3, num_heads, width // num_heads)
    turned = angles(patch_places(grid, length), frequencies)
    query, key = rotate(qkv[:, :, 0], turned), rotate(qkv[:, :, 1], turned)
    seen = torch.arange(length, device=hidden.device) < grid.prod(1, keepdim=True) * MERGED
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), qkv[:, :, 2].transpose(1, 2), attn_mask=seen[:, None, None]
    )
    weights = (out_weight, out_bias, norm2_weight, norm2_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    return vit.after_attention(hidden, join_heads(attended), *weights, eps, act)


def angles(
    places: Tensor,  # [..., axes] int64
    frequencies: Tensor,  # [axes, d / 2] fp32; each column has one number that is not zero
) -> Tensor:  # [..., d / 2] fp32
    """Returns the rotation angles of tokens whose positions have several axes. Each frequency turns with one
    axis."""
    return (places.unsqueeze(-1).float() * frequencies).sum(-2)


def tap(
    hidden: Tensor,  # [B, S, E]
    slots: Tensor,  # [B] int64
    features: Tensor,  # [slots + 1, most tokens, D], written in place
    /,
    norm_weight: Tensor,  # [4 * E]
    norm_bias: Tensor,
    fc1_weight: Tensor,  # [4 * E, 4 * E]
    fc1_bias: Tensor,
    fc2_weight: Tensor,  # [D, 4 * E]
    fc2_bias: Tensor,
    *,
    eps: float,
) -> Tensor:  # [B, S, E], the input
    """Projects the patches to features that a layer of the decoder is given, and writes these into the rows'
    slots."""
    joined = hidden.view(hidden.shape[0], -1, MERGED * hidden.shape[-1])
    normed = F.layer_norm(joined, joined.shape[-1:], norm_weight, norm_bias, eps)
    tokens = torch.arange(joined.shape[1], device=hidden.device)
    features[slots.unsqueeze(1), tokens] = merged(normed, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    return hidden.clone()  # a region must not return its input


def merged(
    joined: Tensor,  # [B, T, 4 * E]: the patches of each token, side by side
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
) -> Tensor:  # [B, T, D]
    """Computes the two linear layers of a projector."""
    return linear(F.gelu(linear(joined, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the encoder's regions."""
    vision = cast(Qwen3VisionConfig, config.vision)
    act, eps = activation(vision.activation), vision.layer_norm_eps
    return {
        "encoder_before": partial(embed, side=vision.position_side),
        "encoder_block": partial(block, num_heads=vision.num_heads, eps=eps, act=act),
        "encoder_tap": partial(tap, eps=eps),
    }


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the encoder's regions."""
    vision = cast(Qwen3VisionConfig, config.vision)
    width, joined = vision.hidden_size, MERGED * vision.hidden_size
    before = {
        **take.statistics(),
        "patch_weight": take.turned(take.place(_patch_weight(take, width))),
        "patch_bias": take("encoder.patch.bias", width),
        "position": take("encoder.position", vision.position_side**2, width),
    }
    turns = take.place(_frequencies(width // vision.num_heads), torch.float32)
    return {
        "encoder_before": [before],
        "encoder_block": [{**block, "frequencies": turns} for block in vit.weights_of_blocks(take, vision)],
        "encoder_tap": [
            {
                **take.affine("norm", f"encoder.tap.{number}.norm", joined),
                **projector_weights(take, f"encoder.tap.{number}", joined, config.decoder.hidden_size),
            }
            for number in range(len(vision.deepstack))
        ],
    }


def projector_weights(take: WeightSource, name: str, joined: int, outputs: int) -> NamedWeights:
    """Returns the weights of ``merged``."""
    return {
        **take.wide("fc1", f"{name}.fc1", joined, joined),
        **take.wide("fc2", f"{name}.fc2", outputs, joined),
    }


def _patch_weight(take: WeightSource, width: int) -> Tensor:
    """Returns the patch embedding [E, 16 * 16 * 3].

    The checkpoint embeds two frames, and a picture is given as both. So its two matrices are added, in fp32.
    """
    weight = take.raw("encoder.patch.weight", width, 3, 2, _PATCH, _PATCH)
    return weight.float().sum(2).permute(0, 2, 3, 1).reshape(width, -1)


def _frequencies(head_dim: int) -> Tensor:
    """Returns rotary frequencies [2, d / 2]: the first half of them turns with rows, the second with columns."""
    spatial = head_dim // 2
    turns = 1.0 / (_THETA ** (torch.arange(0, spatial, 2).float() / spatial))
    none = torch.zeros_like(turns)
    return torch.stack((torch.cat((turns, none)), torch.cat((none, turns))))
