"""Computes Llama's layers (Touvron et al., 2023) over the prefix with the image, and in the decode steps after it.

The prefix consists of the text that a chat template puts before the image, and of the image's tokens. Each of its
tokens sees the tokens before it and never the text behind it, so keys and values of the prefix are the same in
every step. An encode computes these once and stores them in the buffers where other decoders have the K/V of
cross-attention. The last layer computes only its keys and values. A row's own tokens follow, and their positions
continue from the prefix's length.

An encode also reads the first of a row's own tokens, behind the image, and writes their keys and values where
decode steps would write them. So only the last token of an instruction needs a step. Shorter texts are padded. A
row's own tokens replace the K/V of padding before any token attends to them.

B is the padded batch, b the rows of a step, T the prefix's tokens, P those of a text, S = T + P, L the cache
length, D the hidden size, d the head dimension, I the inner size. H heads of keys and values serve n * H heads of
queries. Linear layers are stored [out, in] and have no bias. A prefix block uses the weights of the decoder block
of the same layer.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import LlamaConfig
from snapcap.models.layers.attention import attend_prefixed, join_heads
from snapcap.models.layers.choice import advance
from snapcap.models.layers.linear import Activation, activation, linear
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource, weight_names
from snapcap.models.text import RopeConfig


def embed(
    tokens: Tensor,  # [b] int64
    positions: Tensor,  # [b] int64, ignored: the blocks apply positions as rotations
    /,
    token_weight: Tensor,  # [V, D]
) -> Tensor:  # [b, D]
    """Returns the token embedding of one new token a row."""
    del positions
    return F.embedding(tokens, token_weight)


def between(
    image: Tensor,  # [B, tokens, D]
    slots: Tensor,  # [B] int64
    texts: Tensor,  # [slots + 1, P] int64, -1 behind the end of each text
    token_weight: Tensor,  # [V, D]
    prefix: Tensor | None,  # [n, D], embeddings of the text that a chat template puts before the image, if any
) -> Tensor:  # [B, n + tokens + P, D]
    """Concatenates the embeddings of the chat template's text, the image's tokens, and the beginning of the row's
    text."""
    before = () if prefix is None else (prefix.expand(image.shape[0], -1, -1),)
    return torch.cat((*before, image, F.embedding(texts[slots].clamp(min=0), token_weight)), dim=1)


def prefix_block(
    hidden: Tensor,  # [B, S, D]
    slots: Tensor,  # [B] int64
    image_key: Tensor,  # [1, slots + 1, H, d, T] of this layer, written in place
    image_value: Tensor,  # [1, slots + 1, H, T, d], likewise
    own_key: Tensor,  # [1, slots + 1, H, d, L], likewise
    own_value: Tensor,  # [1, slots + 1, H, L, d], likewise
    /,
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
    """Computes one layer over prefix and text, and writes their keys and values into the rows' slots."""
    angles = _angles(torch.arange(hidden.shape[1], device=hidden.device), frequencies)
    query, key, value = heads_of(hidden, norm1_weight, qkv_weight, image_value, angles, eps)
    caches = (image_key, image_value, own_key, own_value)
    attended = attend_and_keep(query, key, value, slots, *caches, image_value.shape[3])
    return after_attention(hidden, attended, out_weight, norm2_weight, gate_up_weight, down_weight, eps, act)


def prefix_end(
    hidden: Tensor,  # [B, S, D]
    slots: Tensor,  # [B] int64
    image_key: Tensor,  # the last layer's caches, shaped as in `prefix_block`
    image_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    /,
    norm1_weight: Tensor,  # [D]
    qkv_weight: Tensor,  # [(n + 2) * H * d, D]
    frequencies: Tensor,  # [d / 2] fp32
    *,
    eps: float,
) -> Tensor:  # [B, S, D], the input of the last layer
    """Writes the keys and values of the last layer into the rows' slots."""
    angles = _angles(torch.arange(hidden.shape[1], device=hidden.device), frequencies)
    key, value = last_heads_of(hidden, norm1_weight, qkv_weight, image_value, angles, eps)
    keep(key, value, slots, image_key, image_value, own_key, own_value, image_value.shape[3])
    return hidden.clone()  # a region must not return its input


def block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    image_key: Tensor,  # [b, H, d, T]
    image_value: Tensor,  # [b, H, T, d]
    /,
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
    """Computes one layer for one new token a row, which attends to the prefix and to the row's own tokens."""
    angles = _angles(positions + image_value.shape[2], frequencies)
    query, key, value = heads_of(hidden, norm1_weight, qkv_weight, image_value, angles, eps)
    attended = attend_prefixed(query, key, value, positions, key_cache, value_cache, image_key, image_value, scale)
    return after_attention(hidden, attended, out_weight, norm2_weight, gate_up_weight, down_weight, eps, act)


def heads_of(
    hidden: Tensor,  # [..., D]
    norm_weight: Tensor,  # [D]
    qkv_weight: Tensor,  # [(n + 2) * H * d, D]
    values: Tensor,  # [..., H, *, d], a cache of values
    angles: Tensor,  # [..., d / 2] fp32
    eps: float,
    q_norm_weight: Tensor | None = None,  # [d], of a norm of each head's queries, if there is one
    k_norm_weight: Tensor | None = None,  # [d], likewise
) -> tuple[Tensor, Tensor, Tensor]:  # [..., n * H, d], twice [..., H, d]
    """Returns queries, keys and values of a layer's input. Queries and keys are rotated."""
    heads, head_dim = values.shape[-3], values.shape[-1]
    qkv = linear(norm(hidden, norm_weight, eps), qkv_weight).view(*hidden.shape[:-1], -1, head_dim)
    query, key, value = torch.split(qkv, [qkv.shape[-2] - 2 * heads, heads, heads], dim=-2)
    return _turned(query, q_norm_weight, angles, eps), _turned(key, k_norm_weight, angles, eps), value


def last_heads_of(
    hidden: Tensor,  # [B, S, D]
    norm_weight: Tensor,  # [D]
    qkv_weight: Tensor,  # [(n + 2) * H * d, D]
    values: Tensor,  # [..., H, *, d], a cache of values
    angles: Tensor,  # [..., S, d / 2] fp32
    eps: float,
    k_norm_weight: Tensor | None = None,  # [d]
) -> tuple[Tensor, Tensor]:  # twice [B, H, S, d]
    """Returns only the keys and values of `heads_of`, head by head."""
    heads, head_dim = values.shape[-3], values.shape[-1]
    last = slice(-2 * heads * head_dim, None)
    kv = linear(norm(hidden, norm_weight, eps), qkv_weight, outputs=last).view(
        *hidden.shape[:-1], 2, heads, head_dim
    )
    key, value = kv.unbind(-3)
    return _turned(key, k_norm_weight, angles, eps).transpose(1, 2), value.transpose(1, 2)


def _turned(x: Tensor, weight: Tensor | None, angles: Tensor, eps: float) -> Tensor:
    """Applies the norm of heads, if there is one, and rotary positions."""
    return rotate(x if weight is None else norm(x, weight, eps), angles)


def attend_and_keep(
    query: Tensor,  # [B, S, n * H, d]
    key: Tensor,  # [B, S, H, d]
    value: Tensor,  # [B, S, H, d]
    slots: Tensor,  # [B] int64
    image_key: Tensor,
    image_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    image: int,
    seen: Tensor | None = None,  # [B, 1, S, S] bool: which tokens each token sees; None: those up to itself
) -> Tensor:  # [B, S, n * H * d]
    """Computes attention over prefix and text, and `keep`."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    keep(key, value, slots, image_key, image_value, own_key, own_value, image)
    batch, heads, length, head_dim = key.shape
    shared = (batch, heads, query.shape[1] // heads, length, head_dim)
    key, value = (part.unsqueeze(2).expand(shared).flatten(1, 2) for part in (key, value))
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=seen is None)
    return join_heads(attended)


def keep(
    key: Tensor,  # [B, H, S, d]
    value: Tensor,  # [B, H, S, d]
    slots: Tensor,  # [B] int64
    image_key: Tensor,  # the caches of a layer, shaped as in `prefix_block`
    image_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    image: int,
) -> None:
    """Writes the keys and values of the first ``image`` tokens, and of as many text tokens behind them as a cache
    holds.

    The caches are indexed directly. If views of them were indexed, the compiler would copy each cache twice. Where
    the image fills its cache, whole slots are written, which is faster than places of slots.
    """
    rows = slots.unsqueeze(1)
    if image == image_value.shape[3]:
        image_key[:, slots] = key[:, :, :image].mT.to(image_key.dtype)
        image_value[:, slots] = value[:, :, :image].to(image_value.dtype)
    else:
        _write(key[:, :, :image], value[:, :, :image], rows, image_key, image_value)
    last = image + own_value.shape[3]
    _write(key[:, :, image:last], value[:, :, image:last], rows, own_key, own_value)


def _write(key: Tensor, value: Tensor, rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes keys and values [B, H, tokens, d] into the first places of the caches' rows."""
    kept_key, kept_value = (each.transpose(1, 2).unsqueeze(2).to(keys.dtype) for each in (key, value))
    places = torch.arange(key.shape[2], device=rows.device)
    keys[:, rows, :, :, places], values[:, rows, :, places] = kept_key, kept_value


def after_attention(
    hidden: Tensor,  # [..., D], the layer's input
    attended: Tensor,  # [..., n * H * d]
    out_weight: Tensor,  # [D, n * H * d]
    norm_weight: Tensor,  # [D]
    gate_up_weight: Tensor,  # [2 * I, D]
    down_weight: Tensor,  # [D, I]
    eps: float,
    act: Activation,
) -> Tensor:  # [..., D]
    """Computes the rest of a layer: the projection of the attended values, and SwiGLU (Shazeer, 2020)."""
    hidden = hidden + linear(attended, out_weight)
    gate, up = linear(norm(hidden, norm_weight, eps), gate_up_weight).chunk(2, dim=-1)
    return hidden + linear(act(gate) * up, down_weight)


def head(
    hidden: Tensor,  # [b, D]
    tokens: Tensor,  # [b] int64, replaced by the next tokens
    positions: Tensor,  # [b] int64, advanced by one
    forced: Tensor,  # [b, L] int64: the prompt's token at each position, -1 where generation is free
    /,
    norm_weight: Tensor,  # [D]
    head_weight: Tensor,  # [V, D]
    *,
    eps: float,
) -> Tensor:  # [b, V] fp32
    """Computes the logits and advances ``tokens`` and ``positions``."""
    logits = linear(norm(hidden, norm_weight, eps), head_weight)
    advance(logits, tokens, positions, forced)
    return logits.float()


def rotate(
    x: Tensor,  # [..., heads, d]
    angles: Tensor,  # [..., d / 2] fp32
) -> Tensor:  # [..., heads, d]
    """Applies rotary positions (Su et al., 2021), in fp32. Rotates the first half of a head's width with the
    second."""
    cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Returns the rotation angles of positions [...]: [..., d / 2] fp32."""
    return positions.unsqueeze(-1).float() * frequencies


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes RMSNorm (Zhang and Sennrich, 2019), in fp32 whatever the dtype."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the decoder's regions, but for the one before the prefix's blocks, which brings the
    encoder's tokens to the decoder's width."""
    decoder = config.decoder
    act, eps = activation(decoder.activation), decoder.layer_norm_eps
    return {
        "prefix_block": partial(prefix_block, eps=eps, act=act),
        "prefix_after": partial(prefix_end, eps=eps),
        "decoder_before": embed,
        "decoder_block": partial(block, eps=eps, scale=decoder.head_dim**-0.5, act=act),
        "decoder_after": partial(head, eps=eps),
    }


def weights(
    take: WeightSource,
    config: ModelConfig,
    projection: NamedWeights,
    turns: Tensor | None = None,
    further: Sequence[NamedWeights] = (),
    end: RegionFunction = prefix_end,
) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the decoder's regions. All layers share one tensor of frequencies.

    Args:
        projection: the weights of the region before the prefix's blocks, but for the embeddings.
        turns: the rotary frequencies; None is Llama's.
        further: more weights of each layer's block.
        end: the region after the prefix's blocks.
    """
    decoder = cast(LlamaConfig, config.decoder)
    width = decoder.hidden_size
    embedding = {"token_weight": take("decoder.token", decoder.vocab_size, width)}
    token = embedding["token_weight"]
    if turns is None:
        turns = take.place(frequencies(decoder.rope, decoder.head_dim), torch.float32)
    blocks = [_block(take, decoder, layer, turns) for layer in range(decoder.num_layers)]
    blocks = [{**own, **more} for own, more in zip_longest(blocks, further, fillvalue=NamedWeights())]
    prefix = {"prefix": take.place(token[list(config.prefix)])} if config.prefix else {}
    last_norm = {"norm_weight": take("decoder.norm", width)}
    return {
        "prefix_before": [{**projection, **embedding, **prefix}],
        "prefix_block": blocks[:-1],
        "prefix_after": [{name: blocks[-1][name] for name in weight_names(end)}],
        "decoder_before": [embedding],
        "decoder_block": blocks,
        "decoder_after": [{**last_norm, "head_weight": take.head("decoder.head.weight", token, decoder.tied_head)}],
    }


def _block(take: WeightSource, decoder: LlamaConfig, layer: int, turns: Tensor) -> NamedWeights:
    width, inner, name = decoder.hidden_size, decoder.inner_size, f"decoder.layer.{layer}"
    query, shared = decoder.num_heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    parts = (("q", query), ("k", shared), ("v", shared))
    return {
        "norm1_weight": take(f"{name}.norm1", width),
        "qkv_weight": take.place(torch.cat([take.raw(f"{name}.{part}", rows, width) for part, rows in parts])),
        "frequencies": turns,
        "out_weight": take(f"{name}.out", width, query),
        "norm2_weight": take(f"{name}.norm2", width),
        "gate_up_weight": take.stacked([f"{name}.gate", f"{name}.up"], inner, width),
        "down_weight": take(f"{name}.down", width, inner),
    }


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns rotary frequencies [head_dim / 2] fp32: the radians by which one position rotates each pair of
    features (Su et al., 2021).

    With ``rope.scaling``, frequencies are scaled as in Llama 3.1, or divided by a single factor.
    """
    turns = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if not rope.scaling:
        return turns
    factor, *bounds = rope.scaling
    if not bounds:
        return turns / factor
    low, high, context = bounds
    wavelength = 2 * math.pi / turns
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * turns / factor + smooth * turns
