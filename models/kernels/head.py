"""Computes the head of a decode step in two or three launches: logits, each row's greedy token, and its position.

Each program computes the logits of a block of the vocabulary and their maximum, so logits are never read again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.kernels.launch import ahead, launch, let_next_begin, normalised, pointer, wait_for_last
from snapcap.models.kernels.linear import FEW_ROWS, launch_norm

_MOST_ROWS = 256  # rows that a program multiplies at once
_MOST_WIDTH = 2048  # wider rows of the weight do not fit in a program's registers


def fits_width(width: int) -> bool:
    """Returns whether ``head`` is fast for hidden states of ``width`` features."""
    return width <= _MOST_WIDTH


@triton_op("snapcap::head", mutates_args={"tokens", "positions"})
def head(
    hidden: Tensor,  # [b, D]
    tokens: Tensor,  # [b] int64, replaced by the next tokens
    positions: Tensor,  # [b] int64, advanced by one
    forced: Tensor,  # [b, L] int64: the prompt's token at each position, -1 where generation is free
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V], or None
    gamma: Tensor | None,  # [D] of a norm before the product, or None without a norm
    beta: Tensor | None,  # [D] of a layer norm; None for RMSNorm
    eps: float,
) -> Tensor:  # [b, V] fp32
    """Returns the logits, rounded to the dtype of ``hidden``, and advances ``tokens`` and ``positions`` as
    ``advance`` does.

    The greedy token is the first one with the largest logit.
    """
    rows, width = hidden.shape
    vocabulary = weight.shape[0]
    held = min(max(16, triton.next_power_of_2(rows)), _MOST_ROWS)
    logits = torch.empty(rows, vocabulary, dtype=torch.float32, device=hidden.device)
    block = 8 if rows <= FEW_ROWS else 128
    blocks = triton.cdiv(vocabulary, block)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=hidden.device)
    which = torch.empty(rows, blocks, dtype=torch.int32, device=hidden.device)
    launched_ahead = ahead(hidden)
    common = {"WIDTH": width, "VOCABULARY": vocabulary, "BN": block, "BIAS": bias is not None}
    if rows <= FEW_ROWS:
        launch(_few_rows_ahead)[(blocks,)](
            hidden,
            weight,
            pointer(bias, weight),
            pointer(gamma, weight),
            pointer(beta, weight),
            logits,
            best,
            which,
            blocks,
            ROWS=rows,
            PADDED=triton.next_power_of_2(width),
            NORM=gamma is not None,
            CENTRED=beta is not None,
            EPS=eps,
            AHEAD=launched_ahead,
            **common,
            num_warps=4,
        )
    else:
        # The norm is a launch of its own, because otherwise hundreds of programs would each normalise all rows.
        x = hidden if gamma is None else launch_norm(hidden, gamma, beta, eps)
        launch(_many_rows_ahead)[(blocks, triton.cdiv(rows, held))](
            x,
            weight,
            pointer(bias, weight),
            logits,
            best,
            which,
            rows,
            blocks,
            BM=held,
            BK=64 if held <= 128 else 32,  # a GPU of 99 KiB of shared memory must hold three tiles
            AHEAD=launched_ahead,
            **common,
            num_warps=4 if rows <= 64 else 8,
            num_stages=4,
        )
    launch(_choose_ahead)[(rows,)](
        best,
        which,
        tokens,
        positions,
        forced,
        blocks,
        forced.shape[1],
        PADDED=triton.next_power_of_2(blocks),
        AHEAD=launched_ahead,
        num_warps=4,
    )
    return logits


@triton.jit
def _few_rows_ahead(
    hidden,
    weight,
    bias,
    gamma,
    beta,
    logits,
    best,
    which,
    blocks,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BN: tl.constexpr,
    BIAS: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    block = tl.program_id(0)
    n = block * BN + tl.arange(0, BN) + let_next_begin(AHEAD)
    k = tl.arange(0, PADDED)
    live, inside = n < VOCABULARY, k < WIDTH
    tile = tl.load(weight + n[:, None] * WIDTH + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    if NORM:
        scale = tl.load(gamma + k, mask=inside, other=0.0).to(tl.float32)
        shift = scale
        if CENTRED:
            shift = tl.load(beta + k, mask=inside, other=0.0).to(tl.float32)
    hidden += wait_for_last(AHEAD)
    for row in tl.static_range(ROWS):
        value = tl.load(hidden + row * WIDTH + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            value = normalised(value, inside, scale, shift, EPS, WIDTH, CENTRED)
        y = tl.sum(tile.to(tl.float32) * value[None, :], 1)
        if BIAS:
            y += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
        y = y.to(hidden.dtype.element_ty).to(tl.float32)
        tl.store(logits + row * VOCABULARY + n, y, mask=live)
        ranked = tl.where(live, y, float("-inf"))
        top, index = tl.max(ranked, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best + row * blocks + block, top)
        tl.store(which + row * blocks + block, index + block * BN)


@triton.jit
def _many_rows_ahead(
    hidden,
    weight,
    bias,
    logits,
    best,
    which,
    rows,
    blocks,
    WIDTH: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    block = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = block * BN + tl.arange(0, BN) + let_next_begin(AHEAD)
    k = tl.arange(0, BK)
    here, live = m < rows, n < VOCABULARY
    y = tl.zeros([BM, BN], tl.float32)
    hidden += wait_for_last(AHEAD)
    for start in range(0, WIDTH, BK):
        inside = start + k < WIDTH
        value = tl.load(
            hidden + m[:, None] * WIDTH + (start + k)[None, :], mask=here[:, None] & inside[None, :], other=0.0
        )
        tile = tl.load(
            weight + (start + k)[:, None] + n[None, :].to(tl.int64) * WIDTH,
            mask=inside[:, None] & live[None, :],
            other=0.0,
        )
        y = tl.dot(value, tile, y)
    if BIAS:
        y += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)[None, :]
    rounded = y.to(hidden.dtype.element_ty).to(tl.float32)
    tl.store(logits + m[:, None] * VOCABULARY + n[None, :], rounded, mask=here[:, None] & live[None, :])
    ranked = tl.where(live[None, :], rounded, float("-inf"))
    top, index = tl.max(ranked, 1, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + m * blocks + block, top, mask=here)
    tl.store(which + m * blocks + block, index + block * BN, mask=here)


@triton.jit
def _choose_ahead(
    best, which, tokens, positions, forced, blocks, length, PADDED: tl.constexpr, AHEAD: tl.constexpr
):
    row = tl.program_id(0)
    block = tl.arange(0, PADDED)
    last = wait_for_last(AHEAD)
    best, which, positions = best + last, which + last, positions + last
    tops = tl.load(best + row * blocks + block, mask=block < blocks, other=float("-inf"))
    _, first = tl.max(tops, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(which + row * blocks + first).to(tl.int64)
    following = tl.minimum(tl.load(positions + row) + 1, length - 1)
    prompt = tl.load(forced + row * length + following)
    tl.store(tokens + row, tl.where(prompt >= 0, prompt, token))
    tl.store(positions + row, following)
