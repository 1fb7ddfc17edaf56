"""Computes a BERT-like decoder (Devlin et al., 2018) with pure functions of activations, caches and weights.

The blocks are post-norm: each part of a block is followed by a layer norm, where GPT-2 has the norm before it.
BERT, RoBERTa, BLIP's text decoder and TrOCR have the same blocks and differ only before and after them. Everything
that is added to a token's embedding is summed when weights are loaded. If a family lacks a norm or a dense layer,
its region receives fewer weights and skips that layer.

The letters in shapes are those of ``models.layers.gpt2``. Linear layers are stored [out, in].
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import BertConfig
from snapcap.models.layers import cross_kv
from snapcap.models.layers.attention import attend, attend_cached
from snapcap.models.layers.choice import advance
from snapcap.models.layers.linear import Activation, activation, linear
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource


def embed(
    tokens: Tensor,  # [b] int64
    positions: Tensor,  # [b] int64
    /,
    token_weight: Tensor,  # [V, D]
    position_weight: Tensor,  # [n_positions, D]
    norm_weight: Tensor | None = None,  # [D]
    norm_bias: Tensor | None = None,
    *,
    scale: float,
    eps: float,
) -> Tensor:  # [b, D]
    """Returns the sum of the scaled token embedding and the position embedding of one new token a row, normalised
    if there is a norm."""
    hidden = F.embedding(tokens, token_weight) * scale + F.embedding(positions, position_weight)
    if norm_weight is None:
        return hidden
    return F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)


def block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    cross_key: Tensor,  # [b, H, d, T]
    cross_value: Tensor,  # [b, H, T, d]
    /,
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
    /,
    head_weight: Tensor,  # [V, D]
    head_bias: Tensor,  # [V]
    dense_weight: Tensor | None = None,  # [D, D]
    dense_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,  # [D]
    norm_bias: Tensor | None = None,
    *,
    eps: float,
    act: Activation | None,
) -> Tensor:  # [b, V] fp32
    """Computes the logits of the head and advances ``tokens`` and ``positions``. The head is BERT's
    masked-language-model head, or a plain linear layer if ``act`` is None and there is no dense layer."""
    if act is not None and dense_weight is not None:
        hidden = act(linear(hidden, dense_weight, dense_bias))
        hidden = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    logits = linear(hidden, head_weight, head_bias)
    advance(logits, tokens, positions, forced)
    return logits.float()


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the decoder's regions."""
    return {**cross_kv.regions(config), **steps(config, block)}


def steps(config: ModelConfig, block: RegionFunction) -> Mapping[str, RegionFunction]:
    """Returns the functions of a decode step's regions. Decoders with other blocks than `block` have these too."""
    decoder = cast(BertConfig, config.decoder)
    act, eps = activation(decoder.activation), decoder.layer_norm_eps
    head_act = None if decoder.head_activation is None else activation(decoder.head_activation)
    scale = decoder.head_dim**-0.5
    return {
        "decoder_before": partial(embed, scale=decoder.embedding_scale, eps=eps),
        "decoder_block": partial(block, num_heads=decoder.num_heads, eps=eps, scale=scale, act=act),
        "decoder_after": partial(head, eps=eps, act=head_act),
    }


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the decoder's regions."""
    decoder = cast(BertConfig, config.decoder)
    sets = weights_of_steps(take, decoder)
    return {**sets, **cross_kv.weights(take, config, weights_of_cross_kv(take, decoder, config.cross_size))}


def weights_of_steps(take: WeightSource, decoder: BertConfig, cross: bool = True) -> dict[str, list[NamedWeights]]:
    """Returns the weights of a decode step's regions, whose blocks have cross-attention if ``cross`` is true."""
    width = decoder.hidden_size
    token = take("decoder.token", decoder.vocab_size, width)
    position = take.place(_positions(take, decoder))
    norm = take.affine("norm", "decoder.embed_norm", width) if decoder.embedding_norm else {}
    return {
        "decoder_before": [{"token_weight": token, "position_weight": position, **norm}],
        "decoder_block": [_block(take, decoder, layer, cross) for layer in range(decoder.num_layers)],
        "decoder_after": [_head(take, decoder, token)],
    }


def weights_of_cross_kv(take: WeightSource, decoder: BertConfig, inputs: int) -> NamedWeights:
    """Returns keys and values of all layers as one linear layer. ``inputs`` is the width of the states that
    cross-attention reads."""
    names = [
        f"decoder.layer.{layer}.cross_{part}" for layer in range(decoder.num_layers) for part in ("key", "value")
    ]
    weight = take.stacked([f"{name}.weight" for name in names], decoder.hidden_size, inputs)
    return {
        "kv_weight": take.turned(weight),
        "kv_bias": take.stacked([f"{name}.bias" for name in names], decoder.hidden_size),
    }


def _positions(take: WeightSource, decoder: BertConfig) -> Tensor:
    """Returns [n_positions, D]: the position table from the first token's row on, plus the embedding of token type
    0."""
    rows, width = decoder.n_positions + decoder.position_offset, decoder.hidden_size
    table = take.raw("decoder.position", rows, width) if decoder.learned_positions else sinusoids(rows, width)
    positions = table[decoder.position_offset :]
    if not decoder.token_types:
        return positions
    types = take.raw("decoder.token_type", decoder.token_types, width)
    return positions.to(types.device).float() + types[0].float()


def sinusoids(rows: int, width: int) -> Tensor:
    """Returns tensor2tensor's position embedding, sines before cosines (as in fairseq): [rows, width] fp32."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(rows).float().unsqueeze(1) * frequencies.unsqueeze(0)
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.nn.functional.pad(table, (0, width - 2 * half))


def _block(take: WeightSource, decoder: BertConfig, layer: int, cross: bool) -> NamedWeights:
    width, name = decoder.hidden_size, f"decoder.layer.{layer}"
    own = weights_of_layer(take, name, width, decoder.inner_size)
    if not cross:
        return own
    return {
        **own,
        **take.affine("cross_q", f"{name}.cross_query", width, width),
        **take.affine("cross_out", f"{name}.cross_out", width, width),
        **take.affine("norm_cross", f"{name}.norm_cross", width),
    }


def weights_of_layer(take: WeightSource, name: str, width: int, inner: int) -> NamedWeights:
    """Returns the weights of a layer without cross-attention. ``name`` begins the names of its tensors."""
    projections = [f"{name}.{projection}" for projection in ("query", "key", "value")]
    return {
        "qkv_weight": take.stacked([f"{projection}.weight" for projection in projections], width, width),
        "qkv_bias": take.stacked([f"{projection}.bias" for projection in projections], width),
        **take.affine("out", f"{name}.out", width, width),
        **take.affine("norm1", f"{name}.norm1", width),
        **take.affine("fc1", f"{name}.fc1", inner, width),
        **take.affine("fc2", f"{name}.fc2", width, inner),
        **take.affine("norm2", f"{name}.norm2", width),
    }


def _head(take: WeightSource, decoder: BertConfig, token: Tensor) -> NamedWeights:
    width = decoder.hidden_size
    transform: NamedWeights = {}
    if decoder.head_activation is not None:
        transform = {
            **take.affine("dense", "decoder.transform", width, width),
            **take.affine("norm", "decoder.transform_norm", width),
        }
    weight = take.head("decoder.head.weight", token, decoder.tied_head)
    return {"head_weight": weight, "head_bias": _head_bias(take, decoder), **transform}


def _head_bias(take: WeightSource, decoder: BertConfig) -> Tensor:
    """Returns the head's bias, which BERT has under two names. The linear layer's own name goes first.

    A decoder without a bias gets zeros.
    """
    if not decoder.head_bias:
        return take.place(torch.zeros(decoder.vocab_size))
    return take.copy("decoder.head.bias", take("decoder.head.shared_bias", decoder.vocab_size))
