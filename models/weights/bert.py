"""Arranges a BERT-like decoder's tensors in the order its regions take them."""

import math

import torch
from torch import Tensor

from snapcap.models.dimensions import BertConfig, GitConfig
from snapcap.models.weights.source import WeightSet, WeightSource


def cross_kv(take: WeightSource, decoder: BertConfig, inputs: int) -> WeightSet:
    """Returns keys and values of all layers as one linear layer [out, in], for ``models.regions.state.cross_kv``.

    ``inputs`` is the width of the states that cross-attention reads.
    """
    names = [
        f"decoder.layer.{layer}.cross_{part}" for layer in range(decoder.num_layers) for part in ("key", "value")
    ]
    weight = take.stacked([f"{name}.weight" for name in names], decoder.hidden_size, inputs)
    return take.turned(weight), take.stacked([f"{name}.bias" for name in names], decoder.hidden_size)


def embed(take: WeightSource, decoder: BertConfig) -> WeightSet:
    """Returns the weights of ``bert.embed``."""
    width = decoder.hidden_size
    norm = take.affine("decoder.embed_norm", width) if decoder.embedding_norm else ()
    return take("decoder.token", decoder.vocab_size, width), take.place(_positions(take, decoder)), *norm


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


def block(take: WeightSource, decoder: BertConfig, layer: int) -> WeightSet:
    """Returns the weights of ``bert.block``, or of ``git.block``, which has no cross-attention."""
    width, inner, name = decoder.hidden_size, decoder.inner_size, f"decoder.layer.{layer}"
    projections = [f"{name}.{projection}" for projection in ("query", "key", "value")]
    cross: WeightSet = ()
    own = (
        take.stacked([f"{projection}.weight" for projection in projections], width, width),
        take.stacked([f"{projection}.bias" for projection in projections], width),
        *take.affine(f"{name}.out", width, width),
        *take.affine(f"{name}.norm1", width),
    )
    if not isinstance(decoder, GitConfig):
        cross = (
            *take.affine(f"{name}.cross_query", width, width),
            *take.affine(f"{name}.cross_out", width, width),
            *take.affine(f"{name}.norm_cross", width),
        )
    return (
        *own,
        *cross,
        *take.affine(f"{name}.fc1", inner, width),
        *take.affine(f"{name}.fc2", width, inner),
        *take.affine(f"{name}.norm2", width),
    )


def head(take: WeightSource, decoder: BertConfig, token: Tensor) -> WeightSet:
    """Returns the weights of ``bert.head``. ``token`` is the embedding on the device."""
    width = decoder.hidden_size
    transform: WeightSet = ()
    if decoder.head_activation is not None:
        transform = (
            *take.affine("decoder.transform", width, width),
            *take.affine("decoder.transform_norm", width),
        )
    weight = take.head("decoder.head.weight", token, decoder.tied_head)
    return *transform, weight, _head_bias(take, decoder)


def _head_bias(take: WeightSource, decoder: BertConfig) -> Tensor:
    """Returns the head's bias, which BERT has under two names. The linear layer's own name goes first.

    A decoder without a bias gets zeros.
    """
    if not decoder.head_bias:
        return take.place(torch.zeros(decoder.vocab_size))
    return take.copy("decoder.head.bias", take("decoder.head.shared_bias", decoder.vocab_size))
