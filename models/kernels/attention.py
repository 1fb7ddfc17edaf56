"""Computes attention of a decode step and of an encoder over padded texts, and writes the K/V of cross-attention.

In a decode step there is one query a row, and one program for each row and head, which reads K/V once. Caches are
read as [length, head dimension], the layout that `models.regions.state` gives them on CUDA. For the K/V of all
layers the vendor's library is a fifth faster at the product alone, but its output would have to be read and
written again.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.kernels.launch import ahead, launch, let_next_begin, pointer, wait_for_last
from snapcap.models.kernels.linear import FEW_ROWS

_CHUNK = 64  # positions of a row's own cache that a program holds at once
# Encoder tokens that a program holds at once: all 197 of a ViT at 224 pixels. Many rows with more tokens are enough
# programs, which fit better beside each other with half of them.
_CROSS_CHUNK = 256
_ROOMY_ROWS = 16


@triton_op("snapcap::attend_cached", mutates_args={"key_cache", "value_cache"})
def attend_cached(
    qkv: Tensor,  # [b, 3 * H * d]
    positions: Tensor,  # [b] int64
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    scale: float,
) -> Tensor:  # [b, H * d]
    """Caches each row's new token, and computes self-attention over the row's cache up to this token."""
    warps = 4 if qkv.shape[0] <= FEW_ROWS else 1
    return _attend(_attend_cached_ahead, (qkv, positions), key_cache, value_cache, scale, _CHUNK, warps)


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
    crowded = query.shape[0] > _ROOMY_ROWS and key.shape[3] > _CROSS_CHUNK
    chunk = _CROSS_CHUNK // 2 if crowded else _CROSS_CHUNK
    return _attend(_attend_cross_ahead, inputs, key, value, scale, chunk, 4, TEXT=count, TEXT_PADDED=padded)


@triton_op("snapcap::attend_prefixed", mutates_args={"key_cache", "value_cache"})
def attend_prefixed(
    qkv: Tensor,  # [b, (n + 2) * H * d]
    positions: Tensor,  # [b] int64
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    prefix_key: Tensor,  # [b, H, d, T]
    prefix_value: Tensor,  # [b, H, T, d]
    frequencies: Tensor | None,  # [d / 2] fp32: radians by which a position rotates queries and keys
    scale: float,
) -> Tensor:  # [b, n * H * d]
    """Caches each row's new token, and computes attention over a prefix and the row's cache up to this token, with
    one softmax. Each of the H heads of keys and values serves n heads of queries. A rotated token's position counts
    from the prefix's first token."""
    rows, shared, width, length = key_cache.shape
    heads, prefix = qkv.shape[1] // width - 2 * shared, prefix_key.shape[3]
    # A warp has registers for 64 positions of a head of 64.
    chunk = min(_CROSS_CHUNK, triton.next_power_of_2(prefix)) if rows <= _ROOMY_ROWS else _CHUNK
    warps = max(2, chunk // 64) if rows <= _ROOMY_ROWS else 1
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    launch(_attend_prefixed_ahead)[(rows, heads)](
        qkv,
        positions,
        pointer(frequencies, qkv),
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
        SHARED=shared,
        ROTATED=frequencies is not None,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        LENGTH=length,
        CHUNK=_CHUNK,
        PREFIX=prefix,
        PREFIX_CHUNK=chunk,
        AHEAD=ahead(qkv),
        num_warps=warps,
    )
    return out


def _attend(
    kernel: Any,
    inputs: tuple[Tensor, ...],
    key: Tensor,
    value: Tensor,
    scale: float,
    chunk: int,
    warps: int,
    **sizes: int,
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
        AHEAD=ahead(key),
        **sizes,
        num_warps=warps,
    )
    return out


@triton.jit
def _load_chunk(keys, values, key_length, value_length, j, there):
    """Loads the keys and values at positions ``j`` that are ``there``."""
    key = tl.load(keys[None, :] + j[:, None] * key_length, mask=there, other=0.0)
    return key, tl.load(values[None, :] + j[:, None] * value_length, mask=there, other=0.0)


@triton.jit
def _attend_chunk(query, key, value, here, top, total, mixed):
    """Adds keys and values, where ``here``, to a running softmax (Milakov and Gimelshein, 2018).

    The softmax is over more keys than a program holds. ``top`` is its highest score so far, ``total`` its sum and
    ``mixed`` its weighted sum of values. Returns the new values of the three.
    """
    score = tl.where(here, tl.sum(key.to(tl.float32) * query[None, :], 1), float("-inf"))
    higher = tl.maximum(top, tl.max(score, 0))
    shrink, p = tl.exp(top - higher), tl.exp(score - higher)
    return higher, total * shrink + tl.sum(p, 0), mixed * shrink + tl.sum(p[:, None] * value.to(tl.float32), 0)


@triton.jit
def _rotated(x, d, real, cos, sin, WIDTH: tl.constexpr):
    """Loads the features ``d`` of a head at ``x``, and rotates the first half with the second (Su et al., 2021)."""
    first = d < WIDTH // 2
    partner = tl.load(x + tl.where(first, d + WIDTH // 2, d - WIDTH // 2), mask=real, other=0.0).to(tl.float32)
    return tl.load(x + d, mask=real, other=0.0).to(tl.float32) * cos + tl.where(first, -partner, partner) * sin


@triton.jit
def _cache_new(
    qkv,
    position,
    frequencies,
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
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    PREFIX: tl.constexpr,
):
    """Caches the key and value of a row's new token. Returns its query, and a running softmax over this token
    alone.

    The softmax takes the token from registers, because the loads that follow may not see the new key and value
    yet. Programs of heads that share a key and value all store the same.
    """
    new = qkv + row * (HEADS + 2 * SHARED) * WIDTH
    at_key = new + (HEADS + head // (HEADS // SHARED)) * WIDTH
    if ROTATED:
        angle = (position + PREFIX).to(tl.float32) * tl.load(frequencies + d % (WIDTH // 2))
        cos, sin = tl.cos(angle), tl.sin(angle)
        query = _rotated(new + head * WIDTH, d, real, cos, sin, WIDTH)
        new_key = _rotated(at_key, d, real, cos, sin, WIDTH).to(qkv.dtype.element_ty)
    else:
        query = tl.load(new + head * WIDTH + d, mask=real, other=0.0).to(tl.float32)
        new_key = tl.load(at_key + d, mask=real, other=0.0)
    query *= SCALE
    new_value = tl.load(at_key + SHARED * WIDTH + d, mask=real, other=0.0)
    tl.store(keys + position * key_length, new_key, mask=real)
    tl.store(values + position * value_length, new_value, mask=real)
    top = tl.sum(query * new_key.to(tl.float32), 0)
    return query, top, tl.full([], 1.0, tl.float32), new_value.to(tl.float32)


@triton.jit
def _attend_cached_ahead(
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
    AHEAD: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PADDED)
    real = d < WIDTH
    position = tl.load(positions + row)
    keys = key_cache + row * key_row + head * key_head + d * key_width
    values = value_cache + row * value_row + head * value_head + d * value_width
    j = tl.arange(0, CHUNK)
    key, value = _load_chunk(keys, values, key_length, value_length, j, (j < position)[:, None] & real[None, :])
    qkv += wait_for_last(AHEAD)
    query, top, total, mixed = _cache_new(
        qkv,
        position,
        qkv,
        keys,
        values,
        key_length,
        value_length,
        row,
        head,
        d,
        real,
        SCALE,
        HEADS,
        HEADS,
        WIDTH,
        ROTATED=False,
        PREFIX=0,
    )
    top, total, mixed = _attend_chunk(query, key, value, j < position, top, total, mixed)
    for start in range(CHUNK, LENGTH, CHUNK):
        j = start + tl.arange(0, CHUNK)
        there = (j < position)[:, None] & real[None, :]
        key, value = _load_chunk(keys, values, key_length, value_length, j, there)
        top, total, mixed = _attend_chunk(query, key, value, j < position, top, total, mixed)
    out += let_next_begin(AHEAD, total)
    tl.store(out + (row * HEADS + head) * WIDTH + d, (mixed / total).to(out.dtype.element_ty), mask=real)


@triton.jit
def _attend_prefixed_ahead(
    qkv,
    positions,
    frequencies,
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
    SHARED: tl.constexpr,
    ROTATED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX: tl.constexpr,
    PREFIX_CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    source = head // (HEADS // SHARED)  # the head of keys and values
    d = tl.arange(0, PADDED)
    real = d < WIDTH
    position = tl.load(positions + row).to(tl.int32)
    keys = key_cache + row * key_row + source * key_head + d * key_width
    values = value_cache + row * value_row + source * value_head + d * value_width
    far = row.to(tl.int64)
    prefix_keys += far * prefix_key_row + source * prefix_key_head + d * prefix_key_width
    prefix_values += far * prefix_value_row + source * prefix_value_head + d * prefix_value_width
    t = tl.arange(0, PREFIX_CHUNK)
    there = (t < PREFIX)[:, None] & real[None, :]
    key, value = _load_chunk(prefix_keys, prefix_values, prefix_key_length, prefix_value_length, t, there)
    qkv += wait_for_last(AHEAD)
    query, top, total, mixed = _cache_new(
        qkv,
        position,
        frequencies,
        keys,
        values,
        key_length,
        value_length,
        row,
        head,
        d,
        real,
        SCALE,
        HEADS,
        SHARED,
        WIDTH,
        ROTATED,
        PREFIX,
    )
    top, total, mixed = _attend_chunk(query, key, value, t < PREFIX, top, total, mixed)
    for start in range(PREFIX_CHUNK, PREFIX, PREFIX_CHUNK):
        j = start + t
        there = (j < PREFIX)[:, None] & real[None, :]
        key, value = _load_chunk(prefix_keys, prefix_values, prefix_key_length, prefix_value_length, j, there)
        top, total, mixed = _attend_chunk(query, key, value, j < PREFIX, top, total, mixed)
    # Loads of a loop whose end is known begin earlier, which is worth more than two chunks.
    end = LENGTH if LENGTH <= 2 * CHUNK else position
    for start in range(0, end, CHUNK):
        own = start + tl.arange(0, CHUNK)
        seen = own < position
        own_key, own_value = _load_chunk(keys, values, key_length, value_length, own, seen[:, None] & real[None, :])
        top, total, mixed = _attend_chunk(query, own_key, own_value, seen, top, total, mixed)
    out += let_next_begin(AHEAD, total)
    tl.store(out + (row * HEADS + head) * WIDTH + d, (mixed / total).to(out.dtype.element_ty), mask=real)


@triton.jit
def _attend_cross_ahead(
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
    AHEAD: tl.constexpr,
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
    j = tl.arange(0, CHUNK)
    there = (j < seen)[:, None] & real[None, :]
    key, value = _load_chunk(keys, values, key_length, value_length, j, there)
    query += wait_for_last(AHEAD)
    q = tl.load(query + at, mask=real, other=0.0).to(tl.float32) * SCALE
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([PADDED], tl.float32)
    top, total, mixed = _attend_chunk(q, key, value, j < seen, top, total, mixed)
    for start in range(CHUNK, LENGTH, CHUNK):
        j = start + tl.arange(0, CHUNK)
        there = (j < seen)[:, None] & real[None, :]
        key, value = _load_chunk(keys, values, key_length, value_length, j, there)
        top, total, mixed = _attend_chunk(q, key, value, j < seen, top, total, mixed)
    out += let_next_begin(AHEAD, total)
    tl.store(out + at, (mixed / total).to(out.dtype.element_ty), mask=real)


_QUERIES = 64  # queries of a program of `_attend_padded`
_FEW_TOKENS, _NARROW = 256, 64  # tokens and features of a head up to which such a program reads more keys at once
_MOST_WIDTH = 128


def fits_heads(width: int) -> bool:
    """Returns whether there is a kernel for heads of ``width`` features. Tensor cores need a power of two, at
    least 16."""
    return 16 <= width <= _MOST_WIDTH and width & (width - 1) == 0


@triton_op("snapcap::attend_padded", mutates_args=())
def attend_padded(
    qkv: Tensor,  # [B, T, 3 * H * d]
    text: Tensor | None,  # [B, P] int64: the last P of the tokens, -1 behind the end of each text
    heads: int,
) -> Tensor:  # [B, T, H * d]
    """Computes softmax(q K / √d) V over all tokens except padding, with a running softmax (Milakov and Gimelshein,
    2018)."""
    batch, length, outputs = qkv.shape
    width, count = outputs // (3 * heads), 0 if text is None else text.shape[1]
    out = torch.empty(batch, length, heads * width, dtype=qkv.dtype, device=qkv.device)
    keys = 128 if length <= _FEW_TOKENS and width <= _NARROW else 64
    launch(_attend_padded)[(triton.cdiv(length, _QUERIES), heads, batch)](
        qkv,
        pointer(text, qkv),
        out,
        LENGTH=length,
        TEXT=count,
        TEXT_PADDED=triton.next_power_of_2(max(count, 1)),
        HEADS=heads,
        WIDTH=width,
        QUERIES=_QUERIES,
        KEYS=keys,
        # The hardware computes exp2 and not exp, so log2(e) is multiplied into the scale.
        SCALE=width**-0.5 * 1.4426950408889634,
        num_warps=4,
        num_stages=3 if keys * width <= 64 * 64 else 2,  # fits into the shared memory of small GPUs
    )
    return out


@triton.jit
def _attend_padded(
    qkv,
    text,
    out,
    LENGTH: tl.constexpr,
    TEXT: tl.constexpr,
    TEXT_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
):
    head, image = tl.program_id(1), tl.program_id(2)
    seen = LENGTH - TEXT
    if TEXT > 0:
        t = tl.arange(0, TEXT_PADDED)
        said = tl.load(text + image * TEXT + t, mask=t < TEXT, other=-1) >= 0
        seen += tl.sum(said.to(tl.int32), 0)
    features: tl.constexpr = HEADS * WIDTH
    d = tl.arange(0, WIDTH)
    token = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    first = qkv + image.to(tl.int64) * (LENGTH * 3 * features) + head * WIDTH + d[None, :]
    query = tl.load(first + token[:, None] * (3 * features), mask=(token < LENGTH)[:, None], other=0.0)
    first += features
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    whole: tl.constexpr = (LENGTH - TEXT) // KEYS * KEYS  # every query sees the keys in front of this one
    for start in range(0, whole, KEYS):
        top, total, mixed = _attend_keys(
            query, first, start, LENGTH, features, KEYS, SCALE, False, top, total, mixed
        )
    for start in range(whole, LENGTH, KEYS):
        top, total, mixed = _attend_keys(query, first, start, seen, features, KEYS, SCALE, True, top, total, mixed)
    to = out + (image.to(tl.int64) * LENGTH + token[:, None]) * features + head * WIDTH + d[None, :]
    tl.store(to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=(token < LENGTH)[:, None])


@triton.jit
def _attend_keys(
    query,
    first,
    start,
    seen,
    FEATURES: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    top,
    total,
    mixed,
):
    """Adds the keys from ``start`` on to the running softmax of the queries; if ``MASKED``, only those in front of
    ``seen``. Keys begin at ``first``, and values begin ``FEATURES`` numbers behind them."""
    j = start + tl.arange(0, KEYS)
    at = first + j[:, None] * (3 * FEATURES)
    if MASKED:
        there = (j < seen)[:, None]
        key = tl.load(at, mask=there, other=0.0)
        value = tl.load(at + FEATURES, mask=there, other=0.0)
    else:
        key = tl.load(at)
        value = tl.load(at + FEATURES)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if MASKED:
        score = tl.where((j < seen)[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1) * SCALE)
    shrink, p = tl.exp2(top - higher), tl.exp2(score * SCALE - higher[:, None])
    total = total * shrink + tl.sum(p, 1)
    mixed = tl.dot(p.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return higher, total, mixed


@triton_op("snapcap::cross_kv", mutates_args={"key_cache", "value_cache"})
def cross_kv(
    states: Tensor,  # [B, T, D]
    slots: Tensor,  # [B] int64
    key_cache: Tensor,  # [N, slots + 1, H, d, T], written in place
    value_cache: Tensor,  # [N, slots + 1, H, T, d], written in place
    weight: Tensor,  # [N * 2 * H * d, D]
    bias: Tensor,  # [N * 2 * H * d]
) -> None:
    """Computes the keys and values of every decoder layer, and writes them straight into the rows' slots."""
    batch, length, inputs = states.shape
    _, _, heads, _, width = value_cache.shape
    tokens, outputs = batch * length, weight.shape[0]
    # A block of outputs lies in one layer, and in either its keys or its values.
    columns = max(size for size in (16, 32, 64, 128, 256) if (heads * width) % size == 0)
    rows = 128 if tokens > 512 else 64
    launch(_cross_kv)[(triton.cdiv(tokens, rows), outputs // columns)](
        states,
        weight,
        bias,
        slots,
        key_cache,
        value_cache,
        tokens,
        *key_cache.stride(),
        *value_cache.stride(),
        LENGTH=length,
        IN=inputs,
        HEADS=heads,
        WIDTH=width,
        BM=rows,
        BN=columns,
        BK=64,
        num_warps=8,
        num_stages=4,
    )


@triton.jit
def _cross_kv(
    states,
    weight,
    bias,
    slots,
    key_cache,
    value_cache,
    tokens,
    key_layer,
    key_slot,
    key_head,
    key_width,
    key_length,
    value_layer,
    value_slot,
    value_head,
    value_length,
    value_width,
    LENGTH: tl.constexpr,
    IN: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    here = m < tokens
    y = tl.zeros([BM, BN], tl.float32)
    for start in range(0, IN, BK):
        inside = start + k < IN
        value = tl.load(
            states + m[:, None] * IN + (start + k)[None, :], mask=here[:, None] & inside[None, :], other=0.0
        )
        tile = tl.load(weight + (start + k)[:, None] + n[None, :] * IN, mask=inside[:, None], other=0.0)
        y = tl.dot(value, tile, y)
    y = (y + tl.load(bias + n).to(tl.float32)[None, :]).to(key_cache.dtype.element_ty)
    size = HEADS * WIDTH
    layer = ((tl.program_id(1) * BN) // (2 * size)).to(tl.int64)
    is_value = ((tl.program_id(1) * BN) // size) % 2
    column = n % size
    head, d = (column // WIDTH)[None, :], (column % WIDTH)[None, :]
    slot = tl.load(slots + m // LENGTH, mask=here, other=0)[:, None]
    t = (m % LENGTH)[:, None]
    if is_value == 0:
        at = layer * key_layer + slot * key_slot + head * key_head + d * key_width + t * key_length
        tl.store(key_cache + at, y, mask=here[:, None])
    else:
        at = layer * value_layer + slot * value_slot + head * value_head + d * value_width + t * value_length
        tl.store(value_cache + at, y, mask=here[:, None])
