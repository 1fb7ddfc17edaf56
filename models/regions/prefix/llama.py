"""Computes Llama's layers (Touvron et al., 2023): the prefix that an image is, and a decode step after it.

The prefix is what a chat template puts before the image, and the image's tokens. Each of its tokens sees those
before it and never the text, so that keys and values are those of every step to come: they are computed once, as a
stage of the encoder, and kept where other decoders keep cross-attention's. Of the last layer nothing but these is
needed. A row's own tokens follow: their positions are counted on from the prefix's length.

The first of these, as many as an encode reads, go through the same stage behind the image, and their keys and
values to where a step would write them. So an instruction takes no steps but for its last token. Shorter ones are
padded: what padding leaves there is not seen before the row's own tokens have replaced it.

B is the padded batch, b the rows of a step, T the prefix's tokens, P those of a text, S = T + P, L the cache
length, D the hidden size, d the head dimension, I the inner size. H heads of keys and values serve n * H heads of
queries. Linear layers are stored [out, in] and have no bias; a prefix block has the weights of the decoder block of
its layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions.choice.next_token import advance
from snapcap.models.regions.layers.activations import Activation
from snapcap.models.regions.layers.attention import attend_prefixed
from snapcap.models.regions.layers.linear import linear


def embed(
    tokens: Tensor,  # [b] int64
    positions: Tensor,  # [b] int64, which the blocks rotate by
    token_weight: Tensor,  # [V, D]
) -> Tensor:  # [b, D]
    """Token embedding of one new token a row."""
    del positions
    return F.embedding(tokens, token_weight)


def between(
    image: Tensor,  # [B, tokens, D]
    slots: Tensor,  # [B] int64
    texts: Tensor,  # [slots, P] int64, -1 behind the end of each
    token_weight: Tensor,  # [V, D]
    *prefix: Tensor,  # [n, D], embeddings of what a chat template puts before the image, if it does
) -> Tensor:  # [B, n + tokens + P, D]
    """The image's tokens between what stands before them in every row and the beginning of the row's text."""
    before = (each.expand(image.shape[0], -1, -1) for each in prefix)
    return torch.cat((*before, image, F.embedding(texts[slots].clamp(min=0), token_weight)), dim=1)


def prefix_block(
    hidden: Tensor,  # [B, S, D]
    slots: Tensor,  # [B] int64
    image_key: Tensor,  # [1, slots, H, d, T], of this layer, written in place
    image_value: Tensor,  # [1, slots, H, T, d], likewise
    own_key: Tensor,  # [1, slots, H, d, L], likewise
    own_value: Tensor,  # [1, slots, H, L, d], likewise
    norm1_weight: Tensor,  # [D]
    qkv_weight: Tensor,  # [(n + 2) * H * d, D]
    frequencies: Tensor,  # [d / 2] fp32
    out_weight: Tensor,  # [D, n * H * d]
    norm2_weight: Tensor,
    gate_up_weight: Tensor,  # [2 * I, D]
    down_weight: Tensor,  # [D, I]
    *,
    eps: float,
    act: Activation,
) -> Tensor:  # [B, S, D]
    """One layer over prefix and text, whose keys and values go into the rows' slots."""
    batch, length, _ = hidden.shape
    heads, head_dim = image_value.shape[2], image_value.shape[4]
    qkv = F.linear(_norm(hidden, norm1_weight, eps), qkv_weight).view(batch, length, -1, head_dim)
    queries = qkv.shape[2] - 2 * heads
    query, key, value = torch.split(qkv, [queries, heads, heads], dim=2)
    angles = _angles(torch.arange(length, device=hidden.device), frequencies)
    query, key = rotate(query, angles).transpose(1, 2), rotate(key, angles).transpose(1, 2)
    value = value.transpose(1, 2)
    _keep(key, value, slots, image_key, image_value, own_key, own_value)
    shared = (batch, heads, queries // heads, length, head_dim)
    key, value = (part.unsqueeze(2).expand(shared).flatten(1, 2) for part in (key, value))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), out_weight)
    return hidden + _mlp(_norm(hidden, norm2_weight, eps), gate_up_weight, down_weight, act)


def prefix_end(
    hidden: Tensor,  # [B, S, D]
    slots: Tensor,  # [B] int64
    image_key: Tensor,  # as `prefix_block` has them, of the last layer
    image_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    norm1_weight: Tensor,  # [D]
    qkv_weight: Tensor,  # [(n + 2) * H * d, D]
    frequencies: Tensor,  # [d / 2] fp32
    *,
    eps: float,
) -> Tensor:  # [B, S, D], what the last layer takes
    """Keys and values of the last layer into the rows' slots."""
    batch, length, _ = hidden.shape
    heads, head_dim = image_value.shape[2], image_value.shape[4]
    kv_weight = qkv_weight[-2 * heads * head_dim :]
    kv = F.linear(_norm(hidden, norm1_weight, eps), kv_weight).view(batch, length, 2, heads, head_dim)
    key, value = kv.unbind(2)
    key = rotate(key, _angles(torch.arange(length, device=hidden.device), frequencies))
    _keep(key.transpose(1, 2), value.transpose(1, 2), slots, image_key, image_value, own_key, own_value)
    return hidden.clone()  # a region's result is never its input


def _keep(
    key: Tensor,  # [B, H, S, d]
    value: Tensor,  # [B, H, S, d]
    slots: Tensor,
    image_key: Tensor,
    image_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
) -> None:
    """Those of the prefix and, behind it, of the text's tokens, as many as a cache holds.

    A cache is indexed itself, not a view of it: else the compiler copies all of it, twice.
    """
    image, limit = image_value.shape[3], own_value.shape[3]
    image_key[:, slots], image_value[:, slots] = key[:, :, :image].mT, value[:, :, :image]
    text_key, text_value = (each[:, :, image:].transpose(1, 2)[:, :limit].unsqueeze(2) for each in (key, value))
    rows, places = slots.unsqueeze(1), torch.arange(text_key.shape[1], device=slots.device)
    own_key[:, rows, :, :, places], own_value[:, rows, :, places] = text_key, text_value


def block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    image_key: Tensor,  # [b, H, d, T]
    image_value: Tensor,  # [b, H, T, d]
    norm1_weight: Tensor,  # [D]
    qkv_weight: Tensor,  # [(n + 2) * H * d, D]
    frequencies: Tensor,  # [d / 2] fp32
    out_weight: Tensor,  # [D, n * H * d]
    norm2_weight: Tensor,
    gate_up_weight: Tensor,  # [2 * I, D]
    down_weight: Tensor,  # [D, I]
    *,
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:  # [b, D]
    """One layer for one new token a row, which sees the prefix and its past."""
    _, heads, length, head_dim = image_value.shape
    qkv = linear(_norm(hidden, norm1_weight, eps), qkv_weight).view(hidden.shape[0], -1, head_dim)
    query, key, value = torch.split(qkv, [qkv.shape[1] - 2 * heads, heads, heads], dim=1)
    angles = _angles(positions + length, frequencies)
    query, key = rotate(query, angles), rotate(key, angles)
    attended = attend_prefixed(query, key, value, positions, key_cache, value_cache, image_key, image_value, scale)
    hidden = hidden + linear(attended, out_weight)
    return hidden + _mlp(_norm(hidden, norm2_weight, eps), gate_up_weight, down_weight, act)


def head(
    hidden: Tensor,  # [b, D]
    tokens: Tensor,  # [b] int64, replaced by the next tokens
    positions: Tensor,  # [b] int64, advanced by one
    forced: Tensor,  # [b, L] int64: the prompt's token at its position, -1 where generation is free
    norm_weight: Tensor,  # [D]
    head_weight: Tensor,  # [V, D]
    *,
    eps: float,
) -> Tensor:  # [b, V] fp32
    """Logits, and the next token."""
    logits = linear(_norm(hidden, norm_weight, eps), head_weight)
    advance(logits, tokens, positions, forced)
    return logits.float()


def rotate(
    x: Tensor,  # [..., heads, d]
    angles: Tensor,  # [..., d / 2] fp32
) -> Tensor:  # [..., heads, d]
    """Rotary positions (Su et al., 2021): the first half of a head's width with the second, in fp32."""
    cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """[..., d / 2] fp32, of positions [...]."""
    return positions.unsqueeze(-1).float() * frequencies


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019), in fp32 whatever the dtype."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, act: Activation) -> Tensor:
    """SwiGLU (Shazeer, 2020)."""
    gate, up = linear(x, gate_up_weight).chunk(2, dim=-1)
    return linear(act(gate) * up, down_weight)
