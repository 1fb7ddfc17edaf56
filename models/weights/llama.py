"""Arranges a Llama decoder's tensors in the order its regions take them, and computes its rotary frequencies."""

import math

import torch
from torch import Tensor

from snapcap.models.dimensions import LlamaConfig, LlavaConfig
from snapcap.models.text import RopeConfig
from snapcap.models.weights.source import WeightSet, WeightSource


def embed(take: WeightSource, decoder: LlamaConfig) -> WeightSet:
    """Returns the weights of ``llama.embed``."""
    return (take("decoder.token", decoder.vocab_size, decoder.hidden_size),)


def blocks(take: WeightSource, decoder: LlamaConfig) -> tuple[WeightSet, ...]:
    """Returns the weights of ``llama.block`` and ``llama.prefix_block``. All layers share one tensor of
    frequencies."""
    turns = take.place(frequencies(decoder.rope, decoder.head_dim), torch.float32)
    return tuple(_block(take, decoder, layer, turns) for layer in range(decoder.num_layers))


def prefix_end(block: WeightSet) -> WeightSet:
    """Returns the weights of ``llama.prefix_end``, from those of the last layer."""
    norm, qkv, turns, *_ = block
    return norm, qkv, turns


def head(take: WeightSource, decoder: LlamaConfig, token: Tensor) -> WeightSet:
    """Returns the weights of ``llama.head``. ``token`` is the embedding on the device."""
    weight = take.head("decoder.head.weight", token, decoder.tied_head)
    return take("decoder.norm", decoder.hidden_size), weight


def prefix(take: WeightSource, ids: tuple[int, ...], token: Tensor) -> WeightSet:
    """Returns the embeddings [n, D] of the tokens before the image in every row. Empty if there are none."""
    return (take.place(token[list(ids)]),) if ids else ()


def projection(take: WeightSource, decoder: LlavaConfig, inputs: int) -> WeightSet:
    """Returns the weights of ``llava.project``. ``inputs`` is the encoder's width. A projector without a bias gets
    zeros."""
    width = decoder.hidden_size
    if decoder.projector_bias:
        return *take.affine("projection1", width, inputs), *take.affine("projection2", width, width)
    nothing = take.place(torch.zeros(width))
    return take("projection1.weight", width, inputs), nothing, take("projection2.weight", width, width), nothing


def _block(take: WeightSource, decoder: LlamaConfig, layer: int, turns: Tensor) -> WeightSet:
    width, inner, name = decoder.hidden_size, decoder.inner_size, f"decoder.layer.{layer}"
    query, shared = decoder.num_heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    parts = (("q", query), ("k", shared), ("v", shared))
    return (
        take(f"{name}.norm1", width),
        take.place(torch.cat([take.raw(f"{name}.{part}", rows, width) for part, rows in parts])),
        turns,
        take(f"{name}.out", width, query),
        take(f"{name}.norm2", width),
        take.stacked([f"{name}.gate", f"{name}.up"], inner, width),
        take(f"{name}.down", width, inner),
    )


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
