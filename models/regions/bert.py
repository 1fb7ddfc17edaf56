"""Computes a BERT-like decoder (Devlin et al., 2018) with pure functions of activations, caches and weights.

The blocks are post-norm: each part of a block is followed by a layer norm, where GPT-2 has the norm before it.
BERT, RoBERTa, BLIP's text decoder and TrOCR have the same blocks and differ only before and after them. Everything
that is added to a token's embedding is summed when weights are loaded. If a family lacks a norm or a dense layer,
its region receives fewer weights and skips that layer.

The letters in shapes are those of ``models.regions.gpt2``. Linear layers are stored [out, in].
"""

import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions.choice.next_token import advance
from snapcap.models.regions.layers.activations import Activation
from snapcap.models.regions.layers.attention import attend, attend_cached
from snapcap.models.regions.layers.linear import linear


def embed(
    tokens: Tensor,  # [b] int64
    positions: Tensor,  # [b] int64
    token_weight: Tensor,  # [V, D]
    position_weight: Tensor,  # [n_positions, D]
    *norm: Tensor,  # weight and bias [D]; empty if no norm follows
    scale: float,
    eps: float,
) -> Tensor:  # [b, D]
    """Returns the sum of the scaled token embedding and the position embedding of one new token a row, normalised
    if ``norm`` is given."""
    hidden = F.embedding(tokens, token_weight) * scale + F.embedding(positions, position_weight)
    if not norm:
        return hidden
    weight, bias = norm
    return F.layer_norm(hidden, (hidden.shape[-1],), weight, bias, eps)


def block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    cross_key: Tensor,  # [b, H, d, T]
    cross_value: Tensor,  # [b, H, T, d]
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    cross_q_weight: Tensor,
    cross_q_bias: Tensor,
    cross_out_weight: Tensor,
    cross_out_bias: Tensor,
    norm_cross_weight: Tensor,
    norm_cross_bias: Tensor,
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
    unseen: Tensor | None = None,  # [b, 1, 1, T], true where cross-attention must ignore a token
) -> Tensor:  # [b, D]
    """Computes one post-norm decoder layer for one new token a row: self-attention over the cache,
    cross-attention, MLP."""
    rows, width = hidden.shape
    heads = (rows, num_heads, width // num_heads)
    query, key, value = linear(hidden, qkv_weight, qkv_bias).chunk(3, dim=1)
    attended = attend_cached(
        query.view(heads), key.view(heads), value.view(heads), positions, key_cache, value_cache, scale
    )
    hidden = hidden + linear(attended, out_weight, out_bias)
    hidden = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)

    query = linear(hidden, cross_q_weight, cross_q_bias).view(heads)
    attended = attend(query, cross_key, cross_value, scale, unseen)
    hidden = hidden + linear(attended, cross_out_weight, cross_out_bias)
    hidden = F.layer_norm(hidden, (width,), norm_cross_weight, norm_cross_bias, eps)

    hidden = hidden + linear(act(linear(hidden, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)
    return F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)


def head(
    hidden: Tensor,  # [b, D]
    tokens: Tensor,  # [b] int64, replaced by the next tokens
    positions: Tensor,  # [b] int64, advanced by one
    forced: Tensor,  # [b, L] int64: the prompt's token at each position, -1 where generation is free
    *weights: Tensor,  # dense [D, D] and [D], norm [D] and [D], if `act` is given; head [V, D], [V]
    eps: float,
    act: Activation | None,
) -> Tensor:  # [b, V] fp32
    """Computes the logits of the head and advances ``tokens`` and ``positions``. The head is BERT's
    masked-language-model head, or a plain linear layer if ``act`` is None."""
    *transform, head_weight, head_bias = weights
    if act is not None:
        dense_weight, dense_bias, norm_weight, norm_bias = transform
        hidden = act(linear(hidden, dense_weight, dense_bias))
        hidden = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    logits = linear(hidden, head_weight, head_bias)
    advance(logits, tokens, positions, forced)
    return logits.float()
