"""Computes the end of the encoder: the cross-attention keys and values of all decoder layers.

B is the padded batch, T the encoder tokens, D the hidden size, H the heads, d the head dimension, N the layers.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

# Takes states, slots, key cache, value cache, weight and bias.
WriteCrossKV = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


def write_cross_kv(
    states: Tensor,  # [B, T, width of the states that cross-attention reads]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [N, slots + 1, H, d, T], written in place
    value_cache: Tensor,  # [N, slots + 1, H, T, d], written in place
    weight: Tensor,  # [N * 2 * D, width of the states]
    bias: Tensor,
) -> None:
    """Computes all decoder layers' keys and values with one product, and writes them into the rows' slots."""
    layers, _, heads, length, head_dim = value_cache.shape
    kv = F.linear(states, weight, bias).view(-1, length, layers, 2, heads, head_dim)
    key, value = kv.unbind(3)  # each [B, T, N, H, d]
    key_cache[:, slots] = key.permute(2, 0, 3, 4, 1)
    value_cache[:, slots] = value.permute(2, 0, 3, 1, 4)


def cross_kv(
    hidden: Tensor,  # [B, T, encoder D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [N, slots + 1, H, d, T], written in place
    value_cache: Tensor,  # [N, slots + 1, H, T, d], written in place
    *weights: Tensor,  # norm [encoder D], [encoder D]; K and V of all layers [N * 2 * D, in], bias; projection
    eps: float | None,
    write: WriteCrossKV = write_cross_kv,
) -> Tensor:  # [B, T, encoder D], the encoder's output
    """Computes the encoder's last norm, and writes the cross-attention K/V of every decoder layer into the rows'
    slots.

    ``eps`` is None if the encoder ends without a norm. ``weights`` end with a projection of the encoder's output
    if the checkpoint has ``enc_to_dec_proj``. Returns the encoder's output before this projection.
    """
    if eps is None:
        output, others = hidden.clone(), [*weights]  # a region must not return its input
    else:
        norm_weight, norm_bias, *others = weights
        output = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    kv_weight, kv_bias, *projection = others
    states = F.linear(output, *projection) if projection else output
    write(states, slots, key_cache, value_cache, kv_weight, kv_bias)
    return output
