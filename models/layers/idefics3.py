"""Computes and loads the projection of Idefics3 and SmolVLM, between SigLIP's encoder and Llama's layers.

A token of the decoder combines a square of the encoder's tokens. B is the padded batch, S the patches, P the
tokens of a text, E the encoder's width and D the decoder's.
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import SiglipConfig
from snapcap.models.layers import llama
from snapcap.models.layers.linear import linear
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource


def project(
    hidden: Tensor,  # [B, S, E]
    slots: Tensor,  # [B] int64
    texts: Tensor,  # [slots + 1, P] int64
    /,
    norm_weight: Tensor,  # [E]
    norm_bias: Tensor,
    projection_weight: Tensor,  # [D, s * s * E]
    token_weight: Tensor,  # [V, D]
    prefix: Tensor | None = None,  # the prefix of `llama.between`
    *,
    grid: tuple[int, int],
    pixel_shuffle: int,
    eps: float,
) -> Tensor:  # [B, n + S / (s * s) + P, D]
    """Computes the encoder's last norm, and projects each square of s × s patches to one token of the decoder.

    The tokens are put between prefix and text. The patches of a square are concatenated row by row.
    """
    normed = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    (rows, columns), side = grid, pixel_shuffle
    squares = normed.view(-1, rows // side, side, columns // side, side, normed.shape[-1])
    squares = squares.transpose(2, 3).reshape(normed.shape[0], -1, side * side * normed.shape[-1])
    return llama.between(linear(squares, projection_weight), slots, texts, token_weight, prefix)


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the decoder's regions."""
    vision = cast(SiglipConfig, config.vision)
    before = partial(project, grid=vision.grid, pixel_shuffle=vision.pixel_shuffle, eps=vision.layer_norm_eps)
    return {**llama.regions(config), "prefix_before": before}


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the decoder's regions."""
    vision = cast(SiglipConfig, config.vision)
    inputs = vision.pixel_shuffle**2 * vision.hidden_size
    projection = {
        **take.affine("norm", "encoder.norm", vision.hidden_size),
        "projection_weight": take("projection", config.decoder.hidden_size, inputs),
    }
    return llama.weights(take, config, projection)
