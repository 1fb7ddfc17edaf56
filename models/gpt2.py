"""The GPT-2 decoder with cross-attention as pure functions of activations, caches and weights.

b is the padded rows of the step, D the hidden size, H the heads, d the head dimension, N the layers,
L the cache length, T the encoder tokens, V the vocabulary. Every row has its own position, so rows of
different ages run together; a row reads and writes nothing but its own cache, so what other rows hold
never changes its result.

Keys are cached as [H, d, L]: with one query a row, both products of attention then run along contiguous memory,
which is what a compiler fuses and vectorises best on a CPU. On CUDA the same shape has other strides, for kernels
that read whole keys (`models.kv_cache`; benchmarks/NOTES.md has the times).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.activations import Activation
from models.attention import attend

# states, slots, key cache, value cache, weight, bias
WriteCrossKV = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]

CROSS_WEIGHTS = ("norm.weight", "norm.bias", "cross_kv.weight", "cross_kv.bias")
PROJECTION_WEIGHTS = ("projection.weight", "projection.bias")
EMBED_WEIGHTS = ("token", "position")
BLOCK_WEIGHTS = (
    "norm1.weight",
    "norm1.bias",
    "qkv.weight",
    "qkv.bias",
    "out.weight",
    "out.bias",
    "norm_cross.weight",
    "norm_cross.bias",
    "cross_q.weight",
    "cross_q.bias",
    "cross_out.weight",
    "cross_out.bias",
    "norm2.weight",
    "norm2.bias",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
)
HEAD_WEIGHTS = ("norm.weight", "norm.bias", "head.weight")


def write_cross_kv(
    states: Tensor,  # [B, T, D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [N, slots, H, d, T], written in place
    value_cache: Tensor,  # [N, slots, H, T, d], written in place
    weight: Tensor,  # [N * 2 * D, D]
    bias: Tensor,
) -> None:
    """Keys and values of every decoder layer, as one product, into the rows' slots."""
    layers, _, heads, length, head_dim = value_cache.shape
    kv = F.linear(states, weight, bias).view(-1, length, layers, 2, heads, head_dim)
    key, value = kv.unbind(3)  # each [B, T, N, H, d]
    key_cache[:, slots] = key.permute(2, 0, 3, 4, 1)
    value_cache[:, slots] = value.permute(2, 0, 3, 1, 4)


def cross_kv(
    hidden: Tensor,  # [B, T, encoder D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [N, slots, H, d, T], written in place
    value_cache: Tensor,  # [N, slots, H, T, d], written in place
    norm_weight: Tensor,
    norm_bias: Tensor,
    kv_weight: Tensor,  # [N * 2 * D, D]: the K and V projections of all layers, as one product
    kv_bias: Tensor,
    *projection: Tensor,  # enc_to_dec_proj weight [D, encoder D] and bias, where the widths differ
    eps: float,
    write: WriteCrossKV = write_cross_kv,
) -> Tensor:  # [B, T, encoder D], the encoder's output
    """The encoder's last norm, and the cross-attention K and V of every decoder layer into the rows' slots."""
    output = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    states = F.linear(output, *projection) if projection else output
    write(states, slots, key_cache, value_cache, kv_weight, kv_bias)
    return output


def embed(
    tokens: Tensor,  # [b] int64
    positions: Tensor,  # [b] int64
    token_weight: Tensor,  # [V, D]
    position_weight: Tensor,  # [n_positions, D]
) -> Tensor:  # [b, D]
    """Token and position embedding of one new token a row."""
    return F.embedding(tokens, token_weight) + F.embedding(positions, position_weight)


def block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    cross_key: Tensor,  # [b, H, d, T]
    cross_value: Tensor,  # [b, H, T, d]
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    qkv_weight: Tensor,  # [D, 3 * D], as GPT-2 stores every linear layer: [in, out]
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    norm_cross_weight: Tensor,
    norm_cross_bias: Tensor,
    cross_q_weight: Tensor,
    cross_q_bias: Tensor,
    cross_out_weight: Tensor,
    cross_out_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:  # [b, D]
    """One decoder layer for one new token a row: self-attention over the cache, cross-attention, MLP."""
    rows, heads, head_dim, length = key_cache.shape
    width = heads * head_dim
    normed = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    qkv = torch.addmm(qkv_bias, normed, qkv_weight).view(rows, 3, heads, head_dim)
    query, key, value = qkv.unbind(1)  # each [b, H, d]
    at = positions.view(rows, 1, 1, 1)
    key_cache.scatter_(3, at.expand(rows, heads, head_dim, 1), key.unsqueeze(3))
    value_cache.scatter_(2, at.expand(rows, heads, 1, head_dim), value.unsqueeze(2))
    # Slots hold what earlier requests left behind: positions after the row's own are masked, never cleared.
    future = torch.arange(length, device=positions.device) > at
    attended = attend(query, key_cache, value_cache, scale, future)
    hidden = hidden + torch.addmm(out_bias, attended, out_weight)

    normed = F.layer_norm(hidden, (width,), norm_cross_weight, norm_cross_bias, eps)
    query = torch.addmm(cross_q_bias, normed, cross_q_weight).view(rows, heads, head_dim)
    attended = attend(query, cross_key, cross_value, scale)
    hidden = hidden + torch.addmm(cross_out_bias, attended, cross_out_weight)

    normed = F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)
    return hidden + torch.addmm(fc2_bias, act(torch.addmm(fc1_bias, normed, fc1_weight)), fc2_weight)


def head(
    hidden: Tensor,  # [b, D]
    tokens: Tensor,  # [b] int64, replaced by the next tokens
    positions: Tensor,  # [b] int64, advanced by one
    forced: Tensor,  # [b, L] int64: the prompt's token at its position, -1 where generation is free
    norm_weight: Tensor,
    norm_bias: Tensor,
    head_weight: Tensor,  # [V, D]
    *,
    eps: float,
) -> Tensor:  # [b, V]
    """Logits, and the greedy next token; a prompt's own token goes before what the model would say.

    Positions stop at L - 1, so a padding row runs on for ever without leaving its cache.
    """
    last = forced.shape[1] - 1
    logits = F.linear(F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps), head_weight)
    following = (positions + 1).clamp(max=last)
    prompt = forced.gather(1, following.unsqueeze(1)).squeeze(1)
    tokens.copy_(torch.where(prompt >= 0, prompt, logits.argmax(dim=-1)))
    positions.copy_(following)
    return logits
