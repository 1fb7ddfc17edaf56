"""Computes what LLaVA 1.5 (Liu et al., 2023) has between its encoder and Llama's layers.

B is the padded batch, S the encoder's tokens, E its width and D the decoder's.
"""

import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions.layers.activations import Activation
from snapcap.models.regions.prefix.llama import after_prefix


def project(
    hidden: Tensor,  # [B, S, E]
    fc1_weight: Tensor,  # [D, E]
    fc1_bias: Tensor,  # [D]
    fc2_weight: Tensor,  # [D, D]
    fc2_bias: Tensor,
    *prefix: Tensor,  # [n, D], embeddings of what a chat template puts before the image, if it does
    skipped: int,
    act: Activation,
) -> Tensor:  # [B, n + S - skipped, D]
    """Two linear layers over the encoder's tokens but the first ``skipped``, the prefix before them."""
    inner = act(F.linear(hidden[:, skipped:], fc1_weight, fc1_bias))
    return after_prefix(F.linear(inner, fc2_weight, fc2_bias), *prefix)
