"""Attention of a decode step: one query a row, a program a row and head, K/V read once.

Caches are read as [length, head dimension], the layout `models.kv_cache` gives them on CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from models.kernels.launch import launch

_CHUNK = 64  # positions of a row's own cache a program holds at once
_CROSS_CHUNK = 256  # encoder tokens likewise: 197 of a ViT at 224 px in one go


@triton_op("snapcap::attend_cached", mutates_args={"key_cache", "value_cache"})
def attend_cached(
    qkv: Tensor,  # [b, 3 * H * d]
    positions: Tensor,  # [b] int64
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    scale: float,
) -> Tensor:  # [b, H * d]
    """Self-attention over what each row has cached and its new token, which is cached too."""
    rows, heads, width, length = key_cache.shape
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    launch(_attend_cached)[(rows, heads)](
        qkv,
        positions,
        key_cache,
        value_cache,
        out,
        *key_cache.stride(),
        *value_cache.stride(),
        SCALE=scale,
        HEADS=heads,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        LENGTH=length,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return out


@triton_op("snapcap::attend_cross", mutates_args=())
def attend_cross(
    query: Tensor,  # [b, H * d]
    key: Tensor,  # [b, H, d, T]
    value: Tensor,  # [b, H, T, d]
    scale: float,
) -> Tensor:  # [b, H * d]
    """Cross-attention over the encoder's tokens."""
    rows, heads, width, length = key.shape
    out = torch.empty(rows, heads * width, dtype=query.dtype, device=query.device)
    launch(_attend_cross)[(rows, heads)](
        query,
        key,
        value,
        out,
        *key.stride(),
        *value.stride(),
        SCALE=scale,
        HEADS=heads,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        LENGTH=length,
        CHUNK=_CROSS_CHUNK,
        num_warps=4,
    )
    return out


@triton.jit
def _attend_cached(
    qkv,
    positions,
    key_cache,
    value_cache,
    out,
    key_row,
    key_head,
    key_width,
    key_length,
    value_row,
    value_head,
    value_length,
    value_width,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PADDED)
    real = d < WIDTH
    new = qkv + (row * 3 * HEADS + head) * WIDTH + d
    query = tl.load(new, mask=real, other=0.0).to(tl.float32) * SCALE
    new_key = tl.load(new + HEADS * WIDTH, mask=real, other=0.0)
    new_value = tl.load(new + 2 * HEADS * WIDTH, mask=real, other=0.0)
    position = tl.load(positions + row)
    keys = key_cache + row * key_row + head * key_head + d * key_width
    values = value_cache + row * value_row + head * value_head + d * value_width
    tl.store(keys + position * key_length, new_key, mask=real)
    tl.store(values + position * value_length, new_value, mask=real)
    # The new token is taken from registers: what was just stored need not be visible to the loads below.
    top = tl.sum(query * new_key.to(tl.float32), 0)
    total = tl.full([], 1.0, tl.float32)
    mixed = new_value.to(tl.float32)
    for start in range(0, LENGTH, CHUNK):
        j = start + tl.arange(0, CHUNK)
        past = j < position
        there = past[:, None] & real[None, :]
        key = tl.load(keys[None, :] + j[:, None] * key_length, mask=there, other=0.0).to(tl.float32)
        value = tl.load(values[None, :] + j[:, None] * value_length, mask=there, other=0.0).to(tl.float32)
        score = tl.where(past, tl.sum(key * query[None, :], 1), float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        shrink, p = tl.exp(top - higher), tl.exp(score - higher)
        total = total * shrink + tl.sum(p, 0)
        mixed = mixed * shrink + tl.sum(p[:, None] * value, 0)
        top = higher
    tl.store(out + (row * HEADS + head) * WIDTH + d, (mixed / total).to(out.dtype.element_ty), mask=real)


@triton.jit
def _attend_cross(
    query,
    keys,
    values,
    out,
    key_row,
    key_head,
    key_width,
    key_length,
    value_row,
    value_head,
    value_length,
    value_width,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PADDED)
    real = d < WIDTH
    at = (row * HEADS + head) * WIDTH + d
    keys += row.to(tl.int64) * key_row + head * key_head + d * key_width
    values += row.to(tl.int64) * value_row + head * value_head + d * value_width
    q = tl.load(query + at, mask=real, other=0.0).to(tl.float32) * SCALE
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([PADDED], tl.float32)
    for start in range(0, LENGTH, CHUNK):
        j = start + tl.arange(0, CHUNK)
        inside = j < LENGTH
        there = inside[:, None] & real[None, :]
        key = tl.load(keys[None, :] + j[:, None] * key_length, mask=there, other=0.0)
        value = tl.load(values[None, :] + j[:, None] * value_length, mask=there, other=0.0)
        score = tl.where(inside, tl.sum(key.to(tl.float32) * q[None, :], 1), float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        shrink, p = tl.exp(top - higher), tl.exp(score - higher)
        total = total * shrink + tl.sum(p, 0)
        mixed = mixed * shrink + tl.sum(p[:, None] * value.to(tl.float32), 0)
        top = higher
    tl.store(out + at, (mixed / total).to(out.dtype.element_ty), mask=real)
