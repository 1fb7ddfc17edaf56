"""Computes GIT's prefix and its decoder (Wang et al., 2022): the image's tokens stand before the caption's.

Both go through the same post-norm layers of BERT's. The image's tokens see each other and never the text, so that
their keys and values are those of every step to come: they are computed once, as a stage of the encoder, and kept
where other decoders keep cross-attention's. Of the last layer nothing but these is needed.

B is the padded batch, T the image's tokens; the other letters are those of ``models.regions.gpt2``. Linear layers
are stored [out, in]; a prefix block has the weights of the decoder block of its layer.
"""

import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions.layers.activations import Activation
from snapcap.models.regions.layers.attention import attend_all, attend_prefixed
from snapcap.models.regions.layers.linear import linear
from snapcap.models.regions.state.cross_kv import WriteCrossKV, write_cross_kv
from snapcap.models.regions.vit import Activated, activated


def project(
    hidden: Tensor,  # [B, T, encoder D]
    norm_weight: Tensor,  # [encoder D], the encoder's last norm
    norm_bias: Tensor,
    projection_weight: Tensor,  # [D, encoder D]
    projection_bias: Tensor,
    projection_norm_weight: Tensor,  # [D]
    projection_norm_bias: Tensor,
    *,
    eps: float,
) -> Tensor:  # [B, T, D]
    """The image's tokens as the decoder's layers take them."""
    normed = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    projected = F.linear(normed, projection_weight, projection_bias)
    return F.layer_norm(projected, (projected.shape[-1],), projection_norm_weight, projection_norm_bias, eps)


def prefix_block(
    hidden: Tensor,  # [B, T, D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [1, slots, H, d, T], of this layer, written in place
    value_cache: Tensor,  # [1, slots, H, T, d], likewise
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    *,
    num_heads: int,
    eps: float,
    act: Activation,
    activated: Activated = activated,
) -> Tensor:  # [B, T, D]
    """One layer over the image's tokens, whose keys and values go into the rows' slots."""
    batch, length, width = hidden.shape
    qkv = F.linear(hidden, qkv_weight, qkv_bias).view(batch, length, 3, num_heads, width // num_heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, d]
    key_cache[:, slots] = key.mT
    value_cache[:, slots] = value
    attended = attend_all(query, key, value)
    attended = attended.transpose(1, 2).reshape(batch, length, width)
    hidden = hidden + F.linear(attended, out_weight, out_bias)
    hidden = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    hidden = hidden + F.linear(activated(hidden, fc1_weight, fc1_bias, act), fc2_weight, fc2_bias)
    return F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)


def prefix_end(
    hidden: Tensor,  # [B, T, D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [1, slots, H, d, T], of the last layer, written in place
    value_cache: Tensor,  # [1, slots, H, T, d], likewise
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    *,
    write: WriteCrossKV = write_cross_kv,
) -> Tensor:  # [B, T, D], what the last layer takes
    """Keys and values of the last layer into the rows' slots."""
    width = hidden.shape[-1]
    write(hidden, slots, key_cache, value_cache, qkv_weight[width:], qkv_bias[width:])
    return hidden.clone()  # a region's result is never its input


def block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    image_key: Tensor,  # [b, H, d, T]
    image_value: Tensor,  # [b, H, T, d]
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    *,
    num_heads: int,
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:  # [b, D]
    """One layer for one new token a row, which sees the image and its past."""
    rows, width = hidden.shape
    heads = (rows, num_heads, width // num_heads)
    query, key, value = (part.view(heads) for part in linear(hidden, qkv_weight, qkv_bias).chunk(3, dim=1))
    attended = attend_prefixed(query, key, value, positions, key_cache, value_cache, image_key, image_value, scale)
    hidden = hidden + linear(attended, out_weight, out_bias)
    hidden = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    hidden = hidden + linear(act(linear(hidden, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)
    return F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)
