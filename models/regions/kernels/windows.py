"""Computes attention of tokens inside windows of an image, without copying tokens into windows."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.regions.kernels.launch import launch

_WARPS = 4
_QUERIES = 64  # greatest number of queries that a program computes at once
_WINDOW_TOKENS = 256  # greatest window whose scores fit in a program


def fits_windows(grid: tuple[int, int], window: int, width: int) -> bool:
    """Returns whether `attend_windows` can compute heads of ``width`` features over such windows.

    Windows must tile the grid. Tensor cores need powers of two, at least 16.
    """
    rest = _parts(window)[1]
    return (
        all(side % window == 0 for side in grid)
        and 16 <= window * window <= _WINDOW_TOKENS
        and (rest == 0 or (rest >= 16 and _is_power(rest)))
        and width >= 16
        and _is_power(width)
    )


def _parts(window: int) -> tuple[int, int]:
    """Splits the number of tokens of a window into the largest power of two and the rest."""
    tokens = window * window
    largest = 1 << (tokens.bit_length() - 1)
    return largest, tokens - largest


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


@triton_op("snapcap::attend_windows", mutates_args=())
def attend_windows(
    qkv: Tensor,  # [B, rows * columns, 3 * H * d]
    rows: int,
    columns: int,
    window: int,
    heads: int,
) -> Tensor:  # [B, rows * columns, H * d]
    """Computes attention in which the tokens of a square of ``window`` by ``window`` attend to each other.

    Each program computes one head of one square. Programs find the tokens of a square by their places, so no token
    is copied into squares or back.
    """
    batch, length, outputs = qkv.shape
    width = outputs // (3 * heads)
    out = torch.empty(batch, length, heads * width, dtype=qkv.dtype, device=qkv.device)
    squares = batch * (rows // window) * (columns // window)
    large, rest = _parts(window)
    # Neighbouring programs are heads of one square, which read the same cache lines.
    launch(_attend_windows)[(squares * heads,)](
        qkv,
        out,
        ROWS=rows,
        COLUMNS=columns,
        WINDOW=window,
        HEADS=heads,
        WIDTH=width,
        LARGE=large,
        REST=rest,
        QUERIES=min(large, _QUERIES),
        # The hardware computes exp2 and not exp, so log2(e) is multiplied into the scale.
        SCALE=width**-0.5 * 1.4426950408889634,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def _attend_windows(
    qkv,
    out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGE: tl.constexpr,
    REST: tl.constexpr,
    QUERIES: tl.constexpr,
    SCALE: tl.constexpr,
):
    square, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    across: tl.constexpr = COLUMNS // WINDOW
    squares: tl.constexpr = (ROWS // WINDOW) * across
    place = square % squares
    first = (square // squares).to(tl.int64) * (ROWS * COLUMNS)
    first += (place // across) * (WINDOW * COLUMNS) + (place % across) * WINDOW
    t, d = tl.arange(0, LARGE), tl.arange(0, WIDTH)
    at = _places(qkv, first, t, d, head, COLUMNS, WINDOW, 3 * HEADS * WIDTH, WIDTH)
    key, value = tl.load(at + HEADS * WIDTH), tl.load(at + 2 * HEADS * WIDTH)
    key2, value2 = key, value
    if REST > 0:
        r = LARGE + tl.arange(0, REST)
        at = _places(qkv, first, r, d, head, COLUMNS, WINDOW, 3 * HEADS * WIDTH, WIDTH)
        query = tl.load(at)
        key2, value2 = tl.load(at + HEADS * WIDTH), tl.load(at + 2 * HEADS * WIDTH)
        mixed = _attend(query, key, value, key2, value2, REST, SCALE)
        to = _places(out, first, r, d, head, COLUMNS, WINDOW, HEADS * WIDTH, WIDTH)
        tl.store(to, mixed.to(out.dtype.element_ty))
    for start in tl.static_range(0, LARGE, QUERIES):
        q = start + tl.arange(0, QUERIES)
        query = tl.load(_places(qkv, first, q, d, head, COLUMNS, WINDOW, 3 * HEADS * WIDTH, WIDTH))
        mixed = _attend(query, key, value, key2, value2, REST, SCALE)
        to = _places(out, first, q, d, head, COLUMNS, WINDOW, HEADS * WIDTH, WIDTH)
        tl.store(to, mixed.to(out.dtype.element_ty))


@triton.jit
def _places(tensor, first, token, d, head, COLUMNS: tl.constexpr, WINDOW: tl.constexpr, ROW, WIDTH: tl.constexpr):
    """Returns pointers [tokens, WIDTH] to a head's numbers of a window's tokens. A row of ``tensor`` has ROW
    numbers."""
    row = first + (token // WINDOW) * COLUMNS + token % WINDOW
    return tensor + row[:, None] * ROW + head * WIDTH + d[None, :]


@triton.jit
def _attend(query, key, value, key2, value2, REST: tl.constexpr, SCALE: tl.constexpr):
    """Computes attention with a softmax over one block of keys, or over two if REST > 0."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * SCALE
    top = tl.max(score, 1)
    if REST > 0:
        score2 = tl.dot(query, tl.trans(key2), input_precision="ieee") * SCALE
        top = tl.maximum(top, tl.max(score2, 1))
    p = tl.exp2(score - top[:, None])
    total = tl.sum(p, 1)
    mixed = tl.dot(p.to(value.dtype), value, input_precision="ieee")
    if REST > 0:
        p2 = tl.exp2(score2 - top[:, None])
        total += tl.sum(p2, 1)
        mixed = tl.dot(p2.to(value.dtype), value2, mixed, input_precision="ieee")
    return mixed / total[:, None]
