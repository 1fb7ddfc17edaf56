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


def attend_cached(
    query: Tensor,  # [b, H, d]
    key: Tensor,  # [b, H, d]
    value: Tensor,  # [b, H, d]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    scale: float,
) -> Tensor:  # [b, H * d]
    """Causal self-attention of one new token a row: its key and value go into the cache, and it sees its past."""
    rows, heads, head_dim, length = key_cache.shape
    at = positions.view(rows, 1, 1, 1)
    key_cache.scatter_(3, at.expand(rows, heads, head_dim, 1), key.unsqueeze(3))
    value_cache.scatter_(2, at.expand(rows, heads, 1, head_dim), value.unsqueeze(2))
    # Slots hold what earlier requests left behind: positions after the row's own are masked, never cleared.
    future = torch.arange(length, device=positions.device) > at
    return attend(query, key_cache, value_cache, scale, future)
