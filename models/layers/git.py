"""Computes GIT's prefix and its decoder (Wang et al., 2022): the image's tokens stand before the caption's.

Image and caption go through the same post-norm layers, which are BERT's. The image's tokens see each other and
never the text, so their keys and values are the same in every step. An encode computes these once and stores them
in the buffers where other decoders have the K/V of cross-attention. The last layer computes only its keys and
values.

B is the padded batch, T the number of image tokens. The other letters are those of ``models.layers.gpt2``. Linear
layers are stored [out, in]. A prefix block uses the weights of the decoder block of the same layer.
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import GitConfig
from snapcap.models.layers import bert
from snapcap.models.layers.attention import attend_prefixed, split_heads
from snapcap.models.layers.cross_kv import WriteCrossKV, write_cross_kv
from snapcap.models.layers.linear import Activation, activation, linear
from snapcap.models.layers.vit import Activated, Attend, activated, attend
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource, weight_names


def project(
    hidden: Tensor,  # [B, T, encoder D]
    /,
    norm_weight: Tensor,  # [encoder D], the encoder's last norm
    norm_bias: Tensor,
    projection_weight: Tensor,  # [D, encoder D]
    projection_bias: Tensor,
    projection_norm_weight: Tensor,  # [D]
    projection_norm_bias: Tensor,
    *,
    eps: float,
) -> Tensor:  # [B, T, D]
    """Returns the input of the decoder's layers: the image's tokens after the encoder's norm, a projection and a
    norm."""
    normed = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    projected = linear(normed, projection_weight, projection_bias)
    return F.layer_norm(projected, (projected.shape[-1],), projection_norm_weight, projection_norm_bias, eps)


def prefix_block(
    hidden: Tensor,  # [B, T, D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [1, slots + 1, H, d, T] of this layer, written in place
    value_cache: Tensor,  # [1, slots + 1, H, T, d], likewise
    /,
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
    attend: Attend = attend,
) -> Tensor:  # [B, T, D]
    """Computes one layer over the image's tokens, and writes their keys and values into the rows' slots."""
    width, qkv = hidden.shape[-1], linear(hidden, qkv_weight, qkv_bias)
    _, key, value = split_heads(qkv, num_heads)
    key_cache[:, slots], value_cache[:, slots] = key.mT.to(key_cache.dtype), value.to(value_cache.dtype)
    hidden = hidden + linear(attend(qkv, num_heads), out_weight, out_bias)
    hidden = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    hidden = hidden + linear(activated(hidden, fc1_weight, fc1_bias, act), fc2_weight, fc2_bias)
    return F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)


def prefix_end(
    hidden: Tensor,  # [B, T, D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [1, slots + 1, H, d, T] of the last layer, written in place
    value_cache: Tensor,  # [1, slots + 1, H, T, d], likewise
    /,
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    *,
    write: WriteCrossKV = write_cross_kv,
) -> Tensor:  # [B, T, D], the input of the last layer
    """Writes the keys and values of the last layer into the rows' slots."""
    write(hidden, slots, key_cache, value_cache, qkv_weight, qkv_bias)
    return hidden.clone()  # a region must not return its input


def block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    image_key: Tensor,  # [b, H, d, T]
    image_value: Tensor,  # [b, H, T, d]
    /,
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
    """Computes one layer for one new token a row, which attends to the image and to the row's own tokens."""
    rows, width = hidden.shape
    heads = (rows, num_heads, width // num_heads)
    query, key, value = (part.view(heads) for part in linear(hidden, qkv_weight, qkv_bias).chunk(3, dim=1))
    attended = attend_prefixed(query, key, value, positions, key_cache, value_cache, image_key, image_value, scale)
    hidden = hidden + linear(attended, out_weight, out_bias)
    hidden = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    hidden = hidden + linear(act(linear(hidden, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)
    return F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the decoder's regions, and of those over the image's tokens."""
    decoder = config.decoder
    act, eps = activation(decoder.activation), decoder.layer_norm_eps
    return {
        "prefix_before": partial(project, eps=config.vision.layer_norm_eps),
        "prefix_block": partial(prefix_block, num_heads=decoder.num_heads, eps=eps, act=act),
        "prefix_after": prefix_end,
        **bert.steps(config, block),
    }


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of these regions."""
    inputs, width = config.vision.hidden_size, config.decoder.hidden_size
    sets = bert.weights_of_steps(take, cast(GitConfig, config.decoder), cross=False)
    *before, last = sets["decoder_block"]
    projection = {
        **take.affine("norm", "encoder.norm", inputs),
        **take.affine("projection", "projection", width, inputs),
        **take.affine("projection_norm", "projection_norm", width),
    }
    return {
        "prefix_before": [projection],
        "prefix_block": before,
        "prefix_after": [{name: last[name] for name in weight_names(prefix_end)}],
        **sets,
    }
