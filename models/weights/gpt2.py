"""Arranges a GPT-2 decoder's tensors in the order its regions take them.

Linear layers are stored [in, out].
"""

import torch

from snapcap.models.dimensions import Gpt2Config
from snapcap.models.weights.source import WeightSet, WeightSource


def cross_kv(take: WeightSource, decoder: Gpt2Config) -> WeightSet:
    """Returns keys and values of all layers as one linear layer [out, in], for
    ``models.regions.state.cross_kv``."""
    width = decoder.hidden_size
    names = [f"decoder.h.{layer}.crossattention.c_attn" for layer in range(decoder.num_layers)]
    weight = torch.cat([take.raw(f"{name}.weight", width, 2 * width).t() for name in names])
    return take.turned(take.place(weight)), take.stacked([f"{name}.bias" for name in names], 2 * width)


def embed(take: WeightSource, decoder: Gpt2Config) -> WeightSet:
    """Returns the weights of ``gpt2.embed``."""
    return (
        take("decoder.wte.weight", decoder.vocab_size, decoder.hidden_size),
        take("decoder.wpe.weight", decoder.n_positions, decoder.hidden_size),
    )


def block(take: WeightSource, decoder: Gpt2Config, layer: int) -> WeightSet:
    """Returns the weights of ``gpt2.block``."""
    width, inner, name = decoder.hidden_size, decoder.inner_size, f"decoder.h.{layer}"

    def linear(part: str, inputs: int, outputs: int) -> WeightSet:
        weight, bias = take.affine(f"{name}.{part}", inputs, outputs, bias=outputs)
        # The shape is the checkpoint's. On CUDA the weights of one output are contiguous, so a program that
        # computes a few outputs reads whole lines of memory. On a CPU the file's own order needs no copy and is as
        # fast.
        return (weight.t().contiguous().t() if take.layout == "cuda" else weight), bias

    return (
        *take.affine(f"{name}.ln_1", width),
        *linear("attn.c_attn", width, 3 * width),
        *linear("attn.c_proj", width, width),
        *take.affine(f"{name}.ln_cross_attn", width),
        *linear("crossattention.q_attn", width, width),
        *linear("crossattention.c_proj", width, width),
        *take.affine(f"{name}.ln_2", width),
        *linear("mlp.c_fc", width, inner),
        *linear("mlp.c_proj", inner, width),
    )


def head(take: WeightSource, decoder: Gpt2Config, token: torch.Tensor) -> WeightSet:
    """Returns the weights of ``gpt2.head``. ``token`` is the embedding on the device."""
    weight = take.head("decoder.lm_head.weight", token, decoder.tied_head)
    return *take.affine("decoder.ln_f", decoder.hidden_size), weight
