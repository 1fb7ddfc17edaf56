"""Computes an addition, a depthwise convolution and a layer norm in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.regions.kernels.launch import launch, pointer

_TILE = 1024  # numbers of a row that a program holds
_STAGES = 3  # rows that are being loaded at the same time
_STRIP = 8  # greatest number of rows in a program's strip
_PROGRAMS = 1024  # number of programs that keep a device busy; strips are shortened to reach it


@triton_op("snapcap::convolve_and_norm", mutates_args=())
def convolve_and_norm(
    hidden: Tensor,  # [B, rows * columns, D]
    added: Tensor | None,  # [B, rows * columns, D], added to `hidden` first
    weight: Tensor,  # [3, 3, D]
    bias: Tensor,  # [D]
    gamma: Tensor,  # [D]
    beta: Tensor,  # [D]
    rows: int,
    columns: int,
    eps: float,
) -> tuple[Tensor, Tensor]:  # both [B, rows * columns, D]
    """Returns the sum plus its depthwise 3×3 convolution, and the layer norm of this result.

    A program goes down a strip of the image. Each row that it reads contributes to the sums of three rows, which
    the program holds.
    """
    batch, _, width = hidden.shape
    padded = triton.next_power_of_2(width)
    tile = max(1, min(_TILE // padded, triton.next_power_of_2(columns)))
    across, strip = triton.cdiv(columns, tile), _STRIP
    while strip > 1 and across * triton.cdiv(rows, strip) * batch < _PROGRAMS:
        strip //= 2
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    launch(_convolve_and_norm)[(across, triton.cdiv(rows, strip), batch)](
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
        STRIP=strip,
        STAGES=_STAGES,
        EPS=eps,
        num_warps=max(2, min(padded // 256, 8)),  # a thread has registers for the weights of eight channels
    )
    return total, normed


@triton.jit
def _numbers(hidden, added, at, mask, ADDED: tl.constexpr):
    x = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(added + at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _taps(weight, d, real, WIDTH: tl.constexpr):
    """Loads three neighbouring weights of a kernel for each channel: fp32 [1, PADDED] each."""
    left = tl.load(weight + d, mask=real, other=0.0).to(tl.float32)
    middle = tl.load(weight + WIDTH + d, mask=real, other=0.0).to(tl.float32)
    right = tl.load(weight + 2 * WIDTH + d, mask=real, other=0.0).to(tl.float32)
    return left[None, :], middle[None, :], right[None, :]


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
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
    EPS: tl.constexpr,
):
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    top = tl.program_id(1) * STRIP
    image = tl.program_id(2).to(tl.int64) * (ROWS * COLUMNS * WIDTH)
    d = tl.arange(0, PADDED)
    real = d < WIDTH
    inside = (column < COLUMNS)[:, None] & real[None, :]
    has_left = inside & (column > 0)[:, None]
    has_right = (column < COLUMNS - 1)[:, None] & real[None, :]
    up_left, up, up_right = _taps(weight, d, real, WIDTH)
    left, middle, right = _taps(weight + 3 * WIDTH, d, real, WIDTH)
    down_left, down, down_right = _taps(weight + 6 * WIDTH, d, real, WIDTH)
    first = tl.load(bias + d, mask=real, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(gamma + d, mask=real, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(beta + d, mask=real, other=0.0).to(tl.float32)[None, :]
    above = tl.zeros([TILE, PADDED], tl.float32)  # sums of the row before the one that is read
    here = tl.zeros([TILE, PADDED], tl.float32)  # sums of the row that is read
    for step in tl.range(STRIP + 2, num_stages=STAGES):
        row = top + step - 1
        there = (row >= 0) & (row < ROWS)
        at = image + (row * COLUMNS + column)[:, None] * WIDTH + d[None, :]
        x = _numbers(hidden, added, at, inside & there, ADDED)
        before = _numbers(hidden, added, at - WIDTH, has_left & there, ADDED)
        behind = _numbers(hidden, added, at + WIDTH, has_right & there, ADDED)
        sums = above + down_left * before + down * x + down_right * behind
        above = here + left * before + (middle + 1.0) * x + right * behind
        here = first + up_left * before + up * x + up_right * behind
        if (step > 1) & (row <= ROWS):
            to = at - COLUMNS * WIDTH
            tl.store(total + to, sums.to(total.dtype.element_ty), mask=inside)
            centred = tl.where(inside, sums - (tl.sum(tl.where(inside, sums, 0.0), 1) / WIDTH)[:, None], 0.0)
            norm = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + EPS)[:, None]
            tl.store(normed + to, (centred * norm * scale + shift).to(normed.dtype.element_ty), mask=inside)
