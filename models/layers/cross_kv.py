"""Computes and loads the end of an encoder: the cross-attention keys and values of all decoder layers.

B is the padded batch, T the encoder tokens, D the hidden size, H the heads, d the head dimension, N the layers.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.layers.linear import linear
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource

_CACHED = 1 << 20  # numbers of fp32 that stay in a CPU's cache
# Takes states, slots, key cache, value cache, weight and bias.
WriteCrossKV = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


def write_cross_kv(
    states: Tensor,  # [B, T, width of the states that cross-attention reads]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [N, slots + 1, H, d, T], written in place
    value_cache: Tensor,  # [N, slots + 1, H, T, d], written in place
    weight: Tensor,  # [at least N * 2 * D, width of the states]; its last outputs are keys and values
    bias: Tensor,
) -> None:
    """Computes all decoder layers' keys and values, and writes them into the rows' slots. A CPU takes some layers
    at a time, so that what it computes is still in its own cache when it is written."""
    layers, _, heads, length, head_dim = value_cache.shape
    each = 2 * heads * head_dim
    at_once = max(_CACHED // (states.shape[0] * length * each), 1) if states.device.type == "cpu" else layers
    for first in range(0, layers, at_once):
        count = min(at_once, layers - first)
        begin = bias.shape[0] - (layers - first) * each
        kv = linear(states, weight, bias, slice(begin, begin + count * each)).to(key_cache.dtype)
        key, value = kv.view(-1, length, count, 2, heads, head_dim).unbind(3)  # each [B, T, layers, H, d]
        if count == layers:
            key_cache[:, slots] = key.permute(2, 0, 3, 4, 1)
            value_cache[:, slots] = value.permute(2, 0, 3, 1, 4)
        else:
            # If a slice indexed the layers, the compiler would copy the whole K/V cache.
            some = torch.arange(first, first + count, device=slots.device).unsqueeze(1)
            key_cache[some, slots] = key.permute(2, 0, 3, 4, 1)
            value_cache[some, slots] = value.permute(2, 0, 3, 1, 4)


def cross_kv(
    hidden: Tensor,  # [B, T, encoder D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [N, slots + 1, H, d, T], written in place
    value_cache: Tensor,  # [N, slots + 1, H, T, d], written in place
    /,
    kv_weight: Tensor,  # [N * 2 * D, encoder D], of the keys and values of all layers
    kv_bias: Tensor,
    norm_weight: Tensor | None = None,  # [encoder D]
    norm_bias: Tensor | None = None,
    *,
    eps: float,
    write: WriteCrossKV = write_cross_kv,
) -> Tensor:  # [B, T, encoder D], the encoder's output
    """Computes the encoder's last norm, if it has one, and writes the cross-attention K/V of every decoder layer
    into the rows' slots."""
    output = _output(hidden, norm_weight, norm_bias, eps)
    write(output, slots, key_cache, value_cache, kv_weight, kv_bias)
    return output


def projected_cross_kv(
    hidden: Tensor,  # [B, T, encoder D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [N, slots + 1, H, d, T], written in place
    value_cache: Tensor,  # [N, slots + 1, H, T, d], written in place
    /,
    kv_weight: Tensor,  # [N * 2 * D, D], of the keys and values of all layers
    kv_bias: Tensor,
    projection_weight: Tensor,  # [D, encoder D]
    projection_bias: Tensor,
    norm_weight: Tensor | None = None,  # [encoder D]
    norm_bias: Tensor | None = None,
    *,
    eps: float,
    write: WriteCrossKV = write_cross_kv,
) -> Tensor:  # [B, T, encoder D], the encoder's output before the projection
    """Computes `cross_kv` of a checkpoint that projects the encoder's output, with ``enc_to_dec_proj``."""
    output = _output(hidden, norm_weight, norm_bias, eps)
    write(linear(output, projection_weight, projection_bias), slots, key_cache, value_cache, kv_weight, kv_bias)
    return output


def _output(hidden: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float) -> Tensor:
    if norm_weight is None:
        return hidden.clone()  # a region must not return its input
    return F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the function of the encoder's last region."""
    function = projected_cross_kv if config.projected else cross_kv
    return {"encoder_after": partial(function, eps=config.vision.layer_norm_eps)}


def weights(take: WeightSource, config: ModelConfig, kv: NamedWeights) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the encoder's last region.

    Args:
        kv: keys and values of all decoder layers as one linear layer.
    """
    width = config.vision.hidden_size
    projection = (
        take.wide("projection", "projection", config.decoder.hidden_size, width) if config.projected else {}
    )
    norm = take.affine("norm", "encoder.norm", width) if config.vision.final_norm else {}
    return {"encoder_after": [{**kv, **projection, **norm}]}
