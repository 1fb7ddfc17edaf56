"""What DaViT has beside its products, over images of many tokens: each tensor is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.regions.kernels.launch import launch, pointer

_TILE = 2048  # numbers that a program of the convolution holds
_TILE_WARPS = 4
_WINDOW_WARPS = 8


def fits_windows(grid: tuple[int, int], window: int, width: int) -> bool:
    """Whether `attend_windows` has heads of ``width`` features over such windows: its tensor cores take powers of
    two from 16 on, and its windows have no edge."""
    rest = _parts(window)[1]
    return (
        all(side % window == 0 for side in grid)
        and window * window >= 16
        and (rest == 0 or (rest >= 16 and _is_power(rest)))
        and width >= 16
        and _is_power(width)
    )


def _parts(window: int) -> tuple[int, int]:
    """The tokens of a window as a power of two and the rest."""
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
    """Tokens of a square of ``window`` by ``window`` attend to each other, a program a square and head.

    Squares are found by their tokens' places: nothing is sorted into squares before, and nothing back.
    """
    batch, length, outputs = qkv.shape
    width = outputs // (3 * heads)
    out = torch.empty(batch, length, heads * width, dtype=qkv.dtype, device=qkv.device)
    squares = batch * (rows // window) * (columns // window)
    large, rest = _parts(window)
    launch(_attend_windows)[(heads, squares)](
        qkv,
        out,
        ROWS=rows,
        COLUMNS=columns,
        WINDOW=window,
        HEADS=heads,
        WIDTH=width,
        LARGE=large,
        REST=rest,
        SCALE=width**-0.5,
        num_warps=_WINDOW_WARPS,
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
    SCALE: tl.constexpr,
):
    head, square = tl.program_id(0), tl.program_id(1)
    across: tl.constexpr = COLUMNS // WINDOW
    squares: tl.constexpr = (ROWS // WINDOW) * across
    place = square % squares
    first = (square // squares).to(tl.int64) * (ROWS * COLUMNS)
    first += (place // across) * (WINDOW * COLUMNS) + (place % across) * WINDOW
    t, d = tl.arange(0, LARGE), tl.arange(0, WIDTH)
    token = first + (t // WINDOW) * COLUMNS + t % WINDOW
    at = qkv + token[:, None] * (3 * HEADS * WIDTH) + head * WIDTH + d[None, :]
    query, key, value = tl.load(at), tl.load(at + HEADS * WIDTH), tl.load(at + 2 * HEADS * WIDTH)
    to = out + token[:, None] * (HEADS * WIDTH) + head * WIDTH + d[None, :]
    if REST == 0:
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * SCALE
        p = tl.exp(score - tl.max(score, 1)[:, None])
        mixed = tl.dot(p.to(value.dtype), value, input_precision="ieee")
        tl.store(to, (mixed / tl.sum(p, 1)[:, None]).to(out.dtype.element_ty))
    else:
        r = LARGE + tl.arange(0, REST)
        token = first + (r // WINDOW) * COLUMNS + r % WINDOW
        at = qkv + token[:, None] * (3 * HEADS * WIDTH) + head * WIDTH + d[None, :]
        query2, key2, value2 = tl.load(at), tl.load(at + HEADS * WIDTH), tl.load(at + 2 * HEADS * WIDTH)
        to2 = out + token[:, None] * (HEADS * WIDTH) + head * WIDTH + d[None, :]
        mixed = _attend_both(query, key, value, key2, value2, SCALE)
        tl.store(to, mixed.to(out.dtype.element_ty))
        mixed = _attend_both(query2, key, value, key2, value2, SCALE)
        tl.store(to2, mixed.to(out.dtype.element_ty))


@triton.jit
def _attend_both(query, key, value, key2, value2, SCALE: tl.constexpr):
    """One softmax over two blocks of keys."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * SCALE
    score2 = tl.dot(query, tl.trans(key2), input_precision="ieee") * SCALE
    top = tl.maximum(tl.max(score, 1), tl.max(score2, 1))[:, None]
    p, p2 = tl.exp(score - top), tl.exp(score2 - top)
    mixed = tl.dot(p.to(value.dtype), value, input_precision="ieee")
    mixed += tl.dot(p2.to(value.dtype), value2, input_precision="ieee")
    return mixed / (tl.sum(p, 1) + tl.sum(p2, 1))[:, None]


@triton_op("snapcap::convolve_and_norm", mutates_args=())
def convolve_and_norm(
    hidden: Tensor,  # [B, rows * columns, D]
    added: Tensor | None,  # the same, added first
    weight: Tensor,  # [3, 3, D]
    bias: Tensor,  # [D]
    gamma: Tensor,  # [D]
    beta: Tensor,  # [D]
    rows: int,
    columns: int,
    eps: float,
) -> tuple[Tensor, Tensor]:  # both [B, rows * columns, D]
    """The sum with its 3×3 convolution of each channel alone, and the layer norm of that."""
    batch, _, width = hidden.shape
    padded = triton.next_power_of_2(width)
    tile = max(1, min(_TILE // padded, triton.next_power_of_2(columns)))
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    launch(_convolve_and_norm)[(triton.cdiv(columns, tile), rows, batch)](
        hidden,
        pointer(added, hidden),
        weight,
        bias,
        gamma,
        beta,
        total,
        normed,
        ADDED=added is not None,
        ROWS=rows,
        COLUMNS=columns,
        WIDTH=width,
        PADDED=padded,
        TILE=tile,
        EPS=eps,
        num_warps=_TILE_WARPS,
    )
    return total, normed


@triton.jit
def _convolve_and_norm(
    hidden,
    added,
    weight,
    bias,
    gamma,
    beta,
    total,
    normed,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    EPS: tl.constexpr,
):
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64) * (ROWS * COLUMNS * WIDTH)
    d = tl.arange(0, PADDED)
    real = d < WIDTH
    sums = tl.zeros([TILE, PADDED], tl.float32)
    for tap in tl.static_range(9):
        r, c = row + tap // 3 - 1, column + tap % 3 - 1
        there = (r >= 0) & (r < ROWS) & (c >= 0) & (c < COLUMNS)
        at = image + (r * COLUMNS + c)[:, None] * WIDTH + d[None, :]
        mask = there[:, None] & real[None, :]
        x = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
        if ADDED:
            x += tl.load(added + at, mask=mask, other=0.0).to(tl.float32)
        sums += x * tl.load(weight + tap * WIDTH + d, mask=real, other=0.0).to(tl.float32)[None, :]
        if tap == 4:
            sums += x
    sums += tl.load(bias + d, mask=real, other=0.0).to(tl.float32)[None, :]
    at = image + (row * COLUMNS + column)[:, None] * WIDTH + d[None, :]
    inside = (column < COLUMNS)[:, None] & real[None, :]
    tl.store(total + at, sums.to(total.dtype.element_ty), mask=inside)
    centred = tl.where(inside, sums - (tl.sum(tl.where(inside, sums, 0.0), 1) / WIDTH)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + EPS)[:, None]
    scale *= tl.load(gamma + d, mask=real, other=0.0).to(tl.float32)[None, :]
    y = centred * scale + tl.load(beta + d, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=inside)
