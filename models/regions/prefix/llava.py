"""Computes the projector of LLaVA 1.5 (Liu et al., 2023), between its encoder and Llama's layers.

B is the padded batch, S the encoder's tokens, P those of a text, E the encoder's width and D the decoder's.
"""

import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions.layers.activations import Activation
from snapcap.models.regions.prefix.llama import between


def project(
    hidden: Tensor,  # [B, S, E]
    slots: Tensor,  # [B] int64
    texts: Tensor,  # [slots + 1, P] int64
    fc1_weight: Tensor,  # [D, E]
    fc1_bias: Tensor,  # [D]
    fc2_weight: Tensor,  # [D, D]
    fc2_bias: Tensor,
    *embeddings: Tensor,  # the token embedding and the prefix that `llama.between` takes
    skipped: int,
    act: Activation,
) -> Tensor:  # [B, n + S - skipped + P, D]
    """Projects the encoder's tokens, except the first ``skipped``, with two linear layers, and puts them between
    prefix and text."""
    inner = act(F.linear(hidden[:, skipped:], fc1_weight, fc1_bias))
    return between(F.linear(inner, fc2_weight, fc2_bias), slots, texts, *embeddings)
