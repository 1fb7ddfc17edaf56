"""Computes attention: of all tokens to all, and of one new token a row over its cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_SCORES = 1 << 22  # at once, of whole heads; more do not stay in a CPU's cache
_MOST_PARTS = 4  # each is code of its own


def attend_all(
    query: Tensor,  # [B, H, T, d]
    key: Tensor,  # [B, H, T, d]
    value: Tensor,  # [B, H, T, d]
) -> Tensor:  # [B, H, T, d]
    """softmax(q K / √d) V, in which all tokens see each other.

    Compiled for a CPU in bfloat16 it is two products and a softmax in fp32, over some heads at a time, as oneDNN
    multiplies twice as fast as torch's flash attention does there (benchmarks/NOTES.md). Scores are rounded to 16
    bits between, as by `attend`. Beside the result it takes a part's scores, which with many rows is about what
    the widest tensor of an MLP takes.
    """
    if not torch.compiler.is_compiling() or query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(query, key, value)
    batch, heads, length, width = query.shape
    each = max(-(-heads // _MOST_PARTS), _MOST_SCORES // (batch * length * length))
    parts = zip(*(torch.split(tensor, each, dim=1) for tensor in (query, key, value)), strict=True)
    weights = ((_softmax(torch.matmul(q, k.mT), width**-0.5), v) for q, k, v in parts)
    return torch.cat([torch.matmul(weight, v) for weight, v in weights], dim=1)


def _softmax(scores: Tensor, scale: float) -> Tensor:
    """Of scores and their scale in fp32, whatever the dtype."""
    return (scores.float() * scale).softmax(dim=-1).to(scores.dtype)


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
    future = _cache(key, value, positions, key_cache, value_cache)
    return attend(query, key_cache, value_cache, scale, future)


def attend_prefixed(
    query: Tensor,  # [b, n * H, d]: n of them share each head of keys and values
    key: Tensor,  # [b, H, d]
    value: Tensor,  # [b, H, d]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    prefix_key: Tensor,  # [b, H, d, T]
    prefix_value: Tensor,  # [b, H, T, d]
    scale: float,
) -> Tensor:  # [b, n * H * d]
    """The same, and all of a prefix is seen too: one softmax over both."""
    future = _cache(key, value, positions, key_cache, value_cache)
    prefix = prefix_key.shape[3]
    query = query.view(query.shape[0], key.shape[1], -1, query.shape[2])  # [b, H, n, d]
    own = (torch.matmul(query, key_cache).float() * scale).masked_fill(future, float("-inf"))
    scores = torch.cat((torch.matmul(query, prefix_key).float() * scale, own), dim=-1)
    weights = scores.softmax(dim=-1).to(value.dtype)
    seen = torch.matmul(weights[..., :prefix], prefix_value)
    return (seen + torch.matmul(weights[..., prefix:], value_cache)).flatten(1)


def _cache(key: Tensor, value: Tensor, positions: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """Write a new token's key and value [b, H, d] at its position; returns [b, 1, 1, L], true after it."""
    rows = torch.arange(len(positions), device=positions.device)
    # By index, which the compiler does in place; of `scatter_` it makes two copies of the cache.
    key_cache[rows, :, :, positions] = key
    value_cache[rows, :, positions] = value
    # Slots hold what earlier requests left behind: positions after the row's own are masked, never cleared.
    return torch.arange(key_cache.shape[3], device=positions.device) > positions.view(-1, 1, 1, 1)
