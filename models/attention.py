"""Attention of one new token a row over its cache, as every decoder here does it."""

import torch
from torch import Tensor


def attend(
    query: Tensor,  # [b, H, d]
    key: Tensor,  # [b, H, d, L]
    value: Tensor,  # [b, H, L, d]
    scale: float,
    hidden: Tensor | None = None,  # [b, 1, 1, L], true where a key is not to be seen
) -> Tensor:  # [b, H * d]
    """softmax(q K * scale) V for one query a row; the softmax in fp32, whatever the dtype."""
    scores = torch.matmul(query.unsqueeze(2), key).float() * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(dim=-1).to(value.dtype)
    return torch.matmul(weights, value).flatten(1)
