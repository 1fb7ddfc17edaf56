"""Computes the GPT-2 decoder with cross-attention with pure functions of activations, caches and weights.

b is the padded rows of the step, D the hidden size, H the heads, d the head dimension, N the layers, L the cache
length, T the encoder tokens, V the vocabulary. Every row has its own position, so rows of different ages run in
one step. A row reads and writes only its own cache, so other rows never change its result.

Keys are cached as [H, d, L]. With one query a row, both products of attention then run along contiguous memory,
which a compiler fuses and vectorises best on a CPU. On CUDA the same shape has other strides, because the kernels
there read whole keys (`models.regions.state`; benchmarks/NOTES.md has the times).
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import Gpt2Config
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
) -> Tensor:  # [b, D]
    """Returns the sum of the token embedding and the position embedding of one new token a row."""
    return F.embedding(tokens, token_weight) + F.embedding(positions, position_weight)


def block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    cross_key: Tensor,  # [b, H, d, T]
    cross_value: Tensor,  # [b, H, T, d]
    /,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    qkv_weight: Tensor,  # [D, 3 * D]: GPT-2 stores every linear layer as [in, out]
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
    """Computes one pre-norm decoder layer for one new token a row: self-attention over the cache, cross-attention,
    MLP."""
    rows, heads, head_dim, _ = key_cache.shape
    width = heads * head_dim
    normed = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    qkv = _linear(normed, qkv_weight, qkv_bias).view(rows, 3, heads, head_dim)
    query, key, value = qkv.unbind(1)  # each [b, H, d]
    attended = attend_cached(query, key, value, positions, key_cache, value_cache, scale)
    hidden = hidden + _linear(attended, out_weight, out_bias)

    normed = F.layer_norm(hidden, (width,), norm_cross_weight, norm_cross_bias, eps)
    query = _linear(normed, cross_q_weight, cross_q_bias).view(rows, heads, head_dim)
    attended = attend(query, cross_key, cross_value, scale)
    hidden = hidden + _linear(attended, cross_out_weight, cross_out_bias)

    normed = F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)
    return hidden + _linear(act(_linear(normed, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)


def _linear(
    x: Tensor,  # [b, in]
    weight: Tensor,  # [in, out], or int8 as `quantised` returns it
    bias: Tensor,  # [out]
) -> Tensor:  # [b, out]
    return linear(x, weight, bias) if weight.dtype == torch.int8 else torch.addmm(bias, x, weight)


def head(
    hidden: Tensor,  # [b, D]
    tokens: Tensor,  # [b] int64, replaced by the next tokens
    positions: Tensor,  # [b] int64, advanced by one
    forced: Tensor,  # [b, L] int64: the prompt's token at each position, -1 where generation is free
    /,
    norm_weight: Tensor,
    norm_bias: Tensor,
    head_weight: Tensor,  # [V, D]
    *,
    eps: float,
) -> Tensor:  # [b, V] fp32
    """Computes the logits and advances ``tokens`` and ``positions``."""
    logits = linear(F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps), head_weight)
    advance(logits, tokens, positions, forced)
    return logits.float()


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the decoder's regions."""
    decoder = cast(Gpt2Config, config.decoder)
    act, eps = activation(decoder.activation), decoder.layer_norm_eps
    scale = decoder.head_dim**-0.5 if decoder.scale_attention else 1.0
    return {
        **cross_kv.regions(config),
        "decoder_before": embed,
        "decoder_block": partial(block, eps=eps, scale=scale, act=act),
        "decoder_after": partial(head, eps=eps),
    }


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the decoder's regions. Linear layers are stored [in, out]."""
    decoder = cast(Gpt2Config, config.decoder)
    width = decoder.hidden_size
    token = take("decoder.wte.weight", decoder.vocab_size, width)
    position = take("decoder.wpe.weight", decoder.n_positions, width)
    blocks = [_block(take, decoder, layer) for layer in range(decoder.num_layers)]
    norm = take.affine("norm", "decoder.ln_f", width)
    return {
        "decoder_before": [{"token_weight": token, "position_weight": position}],
        "decoder_block": blocks,
        "decoder_after": [{**norm, "head_weight": take.head("decoder.lm_head.weight", token, decoder.tied_head)}],
        **cross_kv.weights(take, config, _cross_kv(take, decoder)),
    }


def _cross_kv(take: WeightSource, decoder: Gpt2Config) -> NamedWeights:
    """Returns keys and values of all layers as one linear layer, stored [out, in]."""
    width = decoder.hidden_size
    names = [f"decoder.h.{layer}.crossattention.c_attn" for layer in range(decoder.num_layers)]
    weight = torch.cat([take.raw(f"{name}.weight", width, 2 * width).t() for name in names])
    return {
        "kv_weight": take.turned(take.place(weight)),
        "kv_bias": take.stacked([f"{name}.bias" for name in names], 2 * width),
    }


def _block(take: WeightSource, decoder: Gpt2Config, layer: int) -> NamedWeights:
    width, inner, name = decoder.hidden_size, decoder.inner_size, f"decoder.h.{layer}"

    def weights_of(ours: str, part: str, inputs: int, outputs: int) -> NamedWeights:
        affine = take.affine(ours, f"{name}.{part}", inputs, outputs, bias=outputs)
        # The shape is the checkpoint's. On CUDA the weights of one output are contiguous, so a program that
        # computes a few outputs reads whole lines of memory. On a CPU the file's own order needs no copy and is as
        # fast.
        if take.quantises:
            affine[f"{ours}_weight"] = affine[f"{ours}_weight"].t()
        elif take.layout == "cuda":
            affine[f"{ours}_weight"] = affine[f"{ours}_weight"].t().contiguous().t()
        return affine

    return {
        **take.affine("norm1", f"{name}.ln_1", width),
        **weights_of("qkv", "attn.c_attn", width, 3 * width),
        **weights_of("out", "attn.c_proj", width, width),
        **take.affine("norm_cross", f"{name}.ln_cross_attn", width),
        **weights_of("cross_q", "crossattention.q_attn", width, width),
        **weights_of("cross_out", "crossattention.c_proj", width, width),
        **take.affine("norm2", f"{name}.ln_2", width),
        **weights_of("fc1", "mlp.c_fc", width, inner),
        **weights_of("fc2", "mlp.c_proj", inner, width),
    }
