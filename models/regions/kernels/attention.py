"""Computes attention of a decode step: one query a row, one program for each row and head, K/V read once.

Caches are read as [length, head dimension], the layout that `models.regions.state.kv_cache` gives them on CUDA.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.regions.kernels.launch import launch, pointer

_CHUNK = 64  # positions of a row's own cache that a program holds at once
_CROSS_CHUNK = 256  # encoder tokens that a program holds at once: all 197 of a ViT at 224 px


@triton_op("snapcap::attend_cached", mutates_args={"key_cache", "value_cache"})
def attend_cached(
    qkv: Tensor,  # [b, 3 * H * d]
    positions: Tensor,  # [b] int64
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    scale: float,
) -> Tensor:  # [b, H * d]
    """Caches each row's new token, and computes self-attention over the row's cache up to this token."""
    return _attend(_attend_cached, (qkv, positions), key_cache, value_cache, scale, _CHUNK)


@triton_op("snapcap::attend_cross", mutates_args=())
def attend_cross(
    query: Tensor,  # [b, H * d]
    key: Tensor,  # [b, H, d, T]
    value: Tensor,  # [b, H, T, d]
    text: Tensor | None,  # [b, P] int64: the last P of the encoder's tokens, -1 behind the end of each text
    scale: float,
) -> Tensor:  # [b, H * d]
    """Computes cross-attention over the encoder's tokens, without the padding behind a text's end."""
    count = 0 if text is None else text.shape[1]
    inputs, padded = (query, pointer(text, query)), triton.next_power_of_2(max(count, 1))
    return _attend(_attend_cross, inputs, key, value, scale, _CROSS_CHUNK, TEXT=count, TEXT_PADDED=padded)


@triton_op("snapcap::attend_prefixed", mutates_args={"key_cache", "value_cache"})
def attend_prefixed(
    qkv: Tensor,  # [b, 3 * H * d]
    positions: Tensor,  # [b] int64
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    prefix_key: Tensor,  # [b, H, d, T]
    prefix_value: Tensor,  # [b, H, T, d]
    scale: float,
) -> Tensor:  # [b, H * d]
    """Caches each row's new token, and computes attention over a prefix and the row's cache up to this token, with
    one softmax."""
    rows, heads, width, length = key_cache.shape
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    launch(_attend_prefixed)[(rows, heads)](
        qkv,
        positions,
        key_cache,
        value_cache,
        prefix_key,
        prefix_value,
        out,
        *key_cache.stride(),
        *value_cache.stride(),
        *prefix_key.stride(),
        *prefix_value.stride(),
        SCALE=scale,
        HEADS=heads,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        LENGTH=length,
        CHUNK=_CHUNK,
        PREFIX=prefix_key.shape[3],
        PREFIX_CHUNK=_CROSS_CHUNK,
        num_warps=4,
    )
    return out


def _attend(
    kernel: Any, inputs: tuple[Tensor, ...], key: Tensor, value: Tensor, scale: float, chunk: int, **sizes: int
) -> Tensor:
    """Launches a kernel on keys [b, H, d, L] and values [b, H, L, d]."""
    rows, heads, width, length = key.shape
    out = torch.empty(rows, heads * width, dtype=inputs[0].dtype, device=key.device)
    launch(kernel)[(rows, heads)](
        *inputs,
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
        CHUNK=chunk,
        **sizes,
        num_warps=4,
    )
    return out


@triton.jit
def _attend_chunk(query, keys, values, key_length, value_length, j, here, real, top, total, mixed):
    """Adds the keys and values at positions ``j`` to a running softmax (Milakov and Gimelshein, 2018).

    The softmax is over more keys than a program holds. ``top`` is its highest score so far, ``total`` its sum and
    ``mixed`` its weighted sum of values. Returns the new values of the three.
    """
    there = here[:, None] & real[None, :]
    key = tl.load(keys[None, :] + j[:, None] * key_length, mask=there, other=0.0).to(tl.float32)
    value = tl.load(values[None, :] + j[:, None] * value_length, mask=there, other=0.0).to(tl.float32)
    score = tl.where(here, tl.sum(key * query[None, :], 1), float("-inf"))
    higher = tl.maximum(top, tl.max(score, 0))
    shrink, p = tl.exp(top - higher), tl.exp(score - higher)
    return higher, total * shrink + tl.sum(p, 0), mixed * shrink + tl.sum(p[:, None] * value, 0)


@triton.jit
def _cache_new(
    qkv,
    position,
    keys,
    values,
    key_length,
    value_length,
    row,
    head,
    d,
    real,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Caches the key and value of a row's new token. Returns its query, and a running softmax over this token
    alone.

    The softmax takes the token from registers, because the loads that follow may not see the new key and value
    yet.
    """
    new = qkv + (row * 3 * HEADS + head) * WIDTH + d
    query = tl.load(new, mask=real, other=0.0).to(tl.float32) * SCALE
    new_key = tl.load(new + HEADS * WIDTH, mask=real, other=0.0)
    new_value = tl.load(new + 2 * HEADS * WIDTH, mask=real, other=0.0)
    tl.store(keys + position * key_length, new_key, mask=real)
    tl.store(values + position * value_length, new_value, mask=real)
    top = tl.sum(query * new_key.to(tl.float32), 0)
    return query, top, tl.full([], 1.0, tl.float32), new_value.to(tl.float32)


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
    position = tl.load(positions + row)
    keys = key_cache + row * key_row + head * key_head + d * key_width
    values = value_cache + row * value_row + head * value_head + d * value_width
    query, top, total, mixed = _cache_new(
        qkv, position, keys, values, key_length, value_length, row, head, d, real, SCALE, HEADS, WIDTH
    )
    for start in range(0, LENGTH, CHUNK):
        j = start + tl.arange(0, CHUNK)
        top, total, mixed = _attend_chunk(
            query, keys, values, key_length, value_length, j, j < position, real, top, total, mixed
        )
    tl.store(out + (row * HEADS + head) * WIDTH + d, (mixed / total).to(out.dtype.element_ty), mask=real)


@triton.jit
def _attend_prefixed(
    qkv,
    positions,
    key_cache,
    value_cache,
    prefix_keys,
    prefix_values,
    out,
    key_row,
    key_head,
    key_width,
    key_length,
    value_row,
    value_head,
    value_length,
    value_width,
    prefix_key_row,
    prefix_key_head,
    prefix_key_width,
    prefix_key_length,
    prefix_value_row,
    prefix_value_head,
    prefix_value_length,
    prefix_value_width,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX: tl.constexpr,
    PREFIX_CHUNK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PADDED)
    real = d < WIDTH
    position = tl.load(positions + row)
    keys = key_cache + row * key_row + head * key_head + d * key_width
    values = value_cache + row * value_row + head * value_head + d * value_width
    query, top, total, mixed = _cache_new(
        qkv, position, keys, values, key_length, value_length, row, head, d, real, SCALE, HEADS, WIDTH
    )
    for start in range(0, LENGTH, CHUNK):
        j = start + tl.arange(0, CHUNK)
        top, total, mixed = _attend_chunk(
            query, keys, values, key_length, value_length, j, j < position, real, top, total, mixed
        )
    far = row.to(tl.int64)
    keys = prefix_keys + far * prefix_key_row + head * prefix_key_head + d * prefix_key_width
    values = prefix_values + far * prefix_value_row + head * prefix_value_head + d * prefix_value_width
    for start in range(0, PREFIX, PREFIX_CHUNK):
        j = start + tl.arange(0, PREFIX_CHUNK)
        top, total, mixed = _attend_chunk(
            query, keys, values, prefix_key_length, prefix_value_length, j, j < PREFIX, real, top, total, mixed
        )
    tl.store(out + (row * HEADS + head) * WIDTH + d, (mixed / total).to(out.dtype.element_ty), mask=real)


@triton.jit
def _attend_cross(
    query,
    text,
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
    TEXT: tl.constexpr,
    TEXT_PADDED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PADDED)
    real = d < WIDTH
    seen = LENGTH
    if TEXT > 0:
        t = tl.arange(0, TEXT_PADDED)
        said = tl.load(text + row * TEXT + t, mask=t < TEXT, other=-1) >= 0
        seen = LENGTH - TEXT + tl.sum(said.to(tl.int32), 0)
    at = (row * HEADS + head) * WIDTH + d
    keys += row.to(tl.int64) * key_row + head * key_head + d * key_width
    values += row.to(tl.int64) * value_row + head * value_head + d * value_width
    q = tl.load(query + at, mask=real, other=0.0).to(tl.float32) * SCALE
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([PADDED], tl.float32)
    for start in range(0, LENGTH, CHUNK):
        j = start + tl.arange(0, CHUNK)
        top, total, mixed = _attend_chunk(
            q, keys, values, key_length, value_length, j, j < seen, real, top, total, mixed
        )
    tl.store(out + at, (mixed / total).to(out.dtype.element_ty), mask=real)
