"""Computes attention of all tokens to all tokens, and of one new token a row over its cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Greatest number of scores computed at once, in whole heads; more would not stay in a CPU's cache.
_MOST_SCORES = 1 << 22
_MOST_PARTS = 4  # the compiler writes separate code for each part


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the queries, keys and values, each [B, H, T, d], of [B, T, 3 * H * d]."""
    heads = qkv.view(*qkv.shape[:2], 3, num_heads, qkv.shape[2] // (3 * num_heads))
    query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def join_heads(attended: Tensor) -> Tensor:
    """Returns the heads [B, H, T, d] of each token side by side, [B, T, H * d]."""
    return attended.transpose(1, 2).flatten(2)


def attend_all(
    query: Tensor,  # [B, H, T, d]
    key: Tensor,  # [B, H, T, d]
    value: Tensor,  # [B, H, T, d]
) -> Tensor:  # [B, H, T, d]
    """Returns softmax(q K / √d) V, in which each token sees all tokens.

    Compiled for a CPU in bfloat16, this is two products and a softmax in fp32 over some of the heads at a time:
    there, oneDNN's products are twice as fast as torch's flash attention (benchmarks/NOTES.md). Scores are rounded
    to 16 bits before the softmax, as in `attend`. The scores of one part need memory too: with many rows, about as
    much as the widest tensor of an MLP.
    """
    if not torch.compiler.is_compiling() or query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(query, key, value)
    batch, heads, length, width = query.shape
    each = max(-(-heads // _MOST_PARTS), _MOST_SCORES // (batch * length * length))
    parts = zip(*(torch.split(tensor, each, dim=1) for tensor in (query, key, value)), strict=True)
    weights = ((_softmax(torch.matmul(q, k.mT), width**-0.5), v) for q, k, v in parts)
    return torch.cat([torch.matmul(weight, v) for weight, v in weights], dim=1)


def _softmax(scores: Tensor, scale: float) -> Tensor:
    """Returns the softmax of ``scores * scale`` in the dtype of ``scores``, computed in fp32."""
    return (scores.float() * scale).softmax(dim=-1).to(scores.dtype)


def attend(
    query: Tensor,  # [b, H, d]
    key: Tensor,  # [b, H, d, L]
    value: Tensor,  # [b, H, L, d]
    scale: float,
    hidden: Tensor | None = None,  # [b, 1, 1, L], true where a key must be ignored
) -> Tensor:  # [b, H * d]
    """Returns softmax(q K * scale) V for one query a row, with the softmax in fp32.

    Keys and values of another dtype than the query are converted. Compiled for a CPU, they are converted while they
    are read, because the compiler makes one loop of a product of a single row.
    """
    scores = torch.matmul(query.unsqueeze(2), key.to(query.dtype)).float() * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(dim=-1).to(query.dtype)
    return torch.matmul(weights, value.to(query.dtype)).flatten(1)


def attend_cached(
    query: Tensor,  # [b, H, d]
    key: Tensor,  # [b, H, d]
    value: Tensor,  # [b, H, d]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    scale: float,
) -> Tensor:  # [b, H * d]
    """Computes causal self-attention of one new token a row: caches its key and value, and attends up to its
    position."""
    future = _cache(key, value, positions, key_cache, value_cache)
    return attend(query, key_cache, value_cache, scale, future)


def attend_prefixed(
    query: Tensor,  # [b, n * H, d]: n query heads share each head of keys and values
    key: Tensor,  # [b, H, d]
    value: Tensor,  # [b, H, d]
    positions: Tensor,  # [b] int64, below L
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    prefix_key: Tensor,  # [b, H, d, T]
    prefix_value: Tensor,  # [b, H, T, d]
    scale: float,
    hidden: Tensor | None = None,  # [b, 1, 1, T], true where the prefix must be ignored
) -> Tensor:  # [b, n * H * d]
    """Computes `attend_cached`, but each token also attends to a prefix, with one softmax over both. A prefix of
    another dtype is converted as in `attend`."""
    future = _cache(key, value, positions, key_cache, value_cache)
    prefix = prefix_key.shape[3]
    query = query.view(query.shape[0], key.shape[1], -1, query.shape[2])  # [b, H, n, d]
    own = (torch.matmul(query, key_cache).float() * scale).masked_fill(future, float("-inf"))
    before = torch.matmul(query, prefix_key.to(query.dtype)).float() * scale
    if hidden is not None:
        before = before.masked_fill(hidden, float("-inf"))
    scores = torch.cat((before, own), dim=-1)
    weights = scores.softmax(dim=-1).to(query.dtype)
    seen = torch.matmul(weights[..., :prefix], prefix_value.to(query.dtype))
    return (seen + torch.matmul(weights[..., prefix:], value_cache)).flatten(1)


def _cache(key: Tensor, value: Tensor, positions: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """Writes a new token's key and value [b, H, d] at its position. Returns [b, 1, 1, L], true behind that
    position."""
    rows = torch.arange(len(positions), device=positions.device)
    # The compiler writes by index in place. With `scatter_` it would copy the cache twice.
    key_cache[rows, :, :, positions] = key
    value_cache[rows, :, positions] = value
    # Slots keep the K/V of earlier requests: positions behind the row's own are masked, never cleared.
    return torch.arange(key_cache.shape[3], device=positions.device) > positions.view(-1, 1, 1, 1)
