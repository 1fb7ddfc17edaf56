"""Computes and loads the projector of LLaVA 1.5 (Liu et al., 2023), between its encoder and Llama's layers.

B is the padded batch, S the encoder's tokens, P those of a text, E the encoder's width and D the decoder's.
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import LlavaConfig
from snapcap.models.layers import llama
from snapcap.models.layers.linear import Activation, activation, linear
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource


def project(
    hidden: Tensor,  # [B, S, E]
    slots: Tensor,  # [B] int64
    texts: Tensor,  # [slots + 1, P] int64
    /,
    fc1_weight: Tensor,  # [D, E]
    fc1_bias: Tensor,  # [D]
    fc2_weight: Tensor,  # [D, D]
    fc2_bias: Tensor,
    token_weight: Tensor,  # [V, D]
    prefix: Tensor | None = None,  # the prefix of `llama.between`
    *,
    skipped: int,
    act: Activation,
) -> Tensor:  # [B, n + S - skipped + P, D]
    """Projects the encoder's tokens, except the first ``skipped``, with two linear layers, and puts them between
    prefix and text."""
    inner = act(linear(hidden[:, skipped:], fc1_weight, fc1_bias))
    return llama.between(linear(inner, fc2_weight, fc2_bias), slots, texts, token_weight, prefix)


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the decoder's regions."""
    act = activation(cast(LlavaConfig, config.decoder).projector_activation)
    before = partial(project, skipped=config.vision.skipped_tokens, act=act)
    return {**llama.regions(config), "prefix_before": before}


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the decoder's regions. A projector without a bias gets zeros."""
    decoder, inputs = cast(LlavaConfig, config.decoder), config.vision.hidden_size
    width = decoder.hidden_size
    if decoder.projector_bias:
        projection = {
            **take.affine("fc1", "projection1", width, inputs),
            **take.affine("fc2", "projection2", width, width),
        }
    else:
        projection = {
            "fc1_weight": take("projection1.weight", width, inputs),
            "fc2_weight": take("projection2.weight", width, width),
            **dict.fromkeys(("fc1_bias", "fc2_bias"), take.place(torch.zeros(width))),
        }
    return llama.weights(take, config, projection)
