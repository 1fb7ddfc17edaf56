"""Computes linear layers of a decode step in one launch: norm, product, bias, activation, gate and residual.

With few rows, the time of a product is the time to read its weights once, and the time of a step depends on how
many kernels wait for each other: about 2 µs for each kernel at 1 row, whatever it computes. Weights are read along
their input axis, which is contiguous in the layout that `models.weights.gpt2` gives them on CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.kernels.launch import (
    activate,
    ahead,
    launch,
    let_next_begin,
    normalised,
    pointer,
    wait_for_last,
)

# With up to this many rows, a row is a vector and a program holds whole rows of the weight. Tensor cores pay off
# with more rows.
FEW_ROWS = 2
_MOST_INPUTS = 4096  # the weights of more do not fit in a program's registers
# With more inputs than this, and with up to so many rows, few programs would multiply many inputs one after the
# other.
_UNDIVIDED, _FEW_TILES = 1024, 128
_SUMMED = 512  # outputs of a program that adds the parts of sums


def fits_inputs(inputs: int) -> bool:
    """Returns whether ``linear`` is fast for so many inputs. The vendor's library is, for more."""
    return inputs <= _MOST_INPUTS


@triton_op("snapcap::linear", mutates_args=())
def linear(
    x: Tensor,  # [b, in]
    weight: Tensor,  # [in, out], of any strides; [in, 2 * out] if gated: of the gates, then of the values
    bias: Tensor | None,  # [out]
    gamma: Tensor | None,  # [in] of a norm before the product, or None without a norm
    beta: Tensor | None,  # [in] of a layer norm; None for RMSNorm
    residual: Tensor | None,  # [b, out], added last
    eps: float,
    act: str,
    gated: bool = False,
) -> Tensor:  # [b, out]
    """Returns act(norm(x) weight + bias) + residual. Sums are in fp32.

    Gated as in SwiGLU (Shazeer, 2020), it returns act(norm(x) gate) * (norm(x) value), without a bias. With up to
    ``FEW_ROWS`` rows, the result is rounded only once. With more rows, norm(x) is rounded too, by a launch of its
    own, because otherwise many programs would normalise the same rows.
    """
    rows, inputs = x.shape
    outputs = weight.shape[1] // (2 if gated else 1)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    strides, sizes = weight.stride(), {"IN": inputs, "OUT": outputs, "GATED": gated}
    after = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "ACT": act, "AHEAD": ahead(x)}
    bias, residual = pointer(bias, x), pointer(residual, x)
    if rows <= FEW_ROWS:
        padded = triton.next_power_of_2(inputs)
        block = 2 if padded > 2048 or gated else 4
        norm = {"NORM": gamma is not None, "CENTRED": beta is not None, "EPS": eps}
        gamma, beta = pointer(gamma, x), pointer(beta, x)
        launch(_few_rows_ahead)[(triton.cdiv(outputs, block),)](
            *(x, weight, bias, gamma, beta, residual, out, *strides),
            ROWS=rows,
            PADDED=padded,
            BN=block,
            num_warps=2 if padded <= 1024 else 4,
            **sizes,
            **norm,
            **after,
        )
        return out
    if gamma is not None:
        x = launch_norm(x, gamma, beta, eps)
    tile = _tile(rows, gated)
    parts = 4 if inputs > _UNDIVIDED and rows <= _FEW_TILES and not gated else 1
    grid = triton.cdiv(outputs, tile["BN"]), triton.cdiv(rows, tile["BM"]), parts
    sums = out if parts == 1 else torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
    late = rows > _FEW_TILES  # many programs: those of the next kernel would take their place
    launch(_many_rows_ahead)[grid](
        x, weight, bias, residual, sums, rows, *strides, PARTS=parts, LATE=late, **sizes, **tile, **after
    )
    if parts > 1:
        count = rows * outputs
        launch(_sum_ahead)[(triton.cdiv(count, _SUMMED),)](
            sums, bias, residual, out, count, OUT=outputs, PARTS=parts, BLOCK=_SUMMED, num_warps=4, **after
        )
    return out


def _tile(rows: int, gated: bool) -> dict[str, int]:
    """Returns how many rows, outputs and inputs a program of `_many_rows_ahead` multiplies at once, its warps, and
    how many loads of inputs are under way (benchmarks/NOTES.md has the times)."""
    if gated:
        return {"BM": 16 if rows < 32 else 64, "BN": 32, "BK": 64, "num_warps": 4, "num_stages": 4}
    if rows < 32:
        return {"BM": 16, "BN": 16, "BK": 128, "num_warps": 2, "num_stages": 4}
    return {"BM": 64, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4 if rows <= _FEW_TILES else 3}


@triton_op("snapcap::norm", mutates_args=())
def norm(
    x: Tensor,  # [b, D]
    gamma: Tensor,  # [D]
    beta: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [b, D]
    """Computes layer norm, with one program for each row."""
    return launch_norm(x, gamma, beta, eps)


def launch_norm(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float) -> Tensor:
    """Computes ``norm``, or RMSNorm without ``beta``, inside another operator's body."""
    rows, width = x.shape
    out = torch.empty_like(x)
    sizes = {"WIDTH": width, "PADDED": triton.next_power_of_2(width), "CENTRED": beta is not None}
    launch(_norm_ahead)[(rows,)](x, gamma, pointer(beta, x), out, EPS=eps, AHEAD=ahead(x), **sizes, num_warps=4)
    return out


@triton.jit
def _norm_ahead(
    x,
    gamma,
    beta,
    out,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    CENTRED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    k = tl.arange(0, PADDED) + let_next_begin(AHEAD)
    inside = k < WIDTH
    at = tl.program_id(0) * WIDTH + k
    scale = tl.load(gamma + k, mask=inside, other=0.0).to(tl.float32)
    shift = scale
    if CENTRED:
        shift = tl.load(beta + k, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + wait_for_last(AHEAD) + at, mask=inside, other=0.0).to(tl.float32)
    y = normalised(value, inside, scale, shift, EPS, WIDTH, CENTRED)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _few_rows_ahead(
    x,
    weight,
    bias,
    gamma,
    beta,
    residual,
    out,
    stride_in,
    stride_out,
    ROWS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PADDED: tl.constexpr,
    BN: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EPS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Computes BN outputs of every row. The weights are loaded first: their loads depend on nothing else."""
    n = tl.program_id(0) * BN + tl.arange(0, BN) + let_next_begin(AHEAD)
    k = tl.arange(0, PADDED)
    live, inside = n < OUT, k < IN
    weights, both = weight + n[:, None] * stride_out + k[None, :] * stride_in, live[:, None] & inside[None, :]
    tile = tl.load(weights, mask=both, other=0.0).to(tl.float32)
    if GATED:
        second = tl.load(weights + OUT * stride_out, mask=both, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    if NORM:
        norm_scale = tl.load(gamma + k, mask=inside, other=0.0).to(tl.float32)
        norm_shift = norm_scale
        if CENTRED:
            norm_shift = tl.load(beta + k, mask=inside, other=0.0).to(tl.float32)
    last = wait_for_last(AHEAD)
    x, residual = x + last, residual + last
    for row in tl.static_range(ROWS):
        value = tl.load(x + row * IN + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            value = normalised(value, inside, norm_scale, norm_shift, EPS, IN, CENTRED)
        y = tl.sum(tile * value[None, :], 1)
        if BIAS:
            y += shift
        y = activate(y, ACT)
        if GATED:
            y *= tl.sum(second * value[None, :], 1)
        if RESIDUAL:
            y += tl.load(residual + row * OUT + n, mask=live, other=0.0).to(tl.float32)
        tl.store(out + row * OUT + n, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _many_rows_ahead(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    stride_in,
    stride_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    LATE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Computes BN outputs of BM rows, at least 16, the fewest that tensor cores take. With PARTS above 1, a program
    multiplies a part of the inputs, and ``out`` is [PARTS, b, out] fp32: sums, which `_sum_ahead` adds."""
    n = tl.program_id(0) * BN + tl.arange(0, BN) + let_next_begin(AHEAD and not LATE)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    live, here = n < OUT, m < rows
    values = x + m[:, None] * IN + k[None, :]
    weights = weight + k[:, None] * stride_in + n[None, :] * stride_out
    y = tl.zeros([BM, BN], tl.float32)
    if GATED:
        other = tl.zeros([BM, BN], tl.float32)
    part: tl.constexpr = (IN + PARTS * BK - 1) // (PARTS * BK) * BK  # inputs
    first = tl.program_id(2) * part
    last = wait_for_last(AHEAD)
    values, residual = values + last, residual + last
    for step in range(0, part, BK):
        start = first + step
        inside = start + k < IN
        value = tl.load(values + start, mask=here[:, None] & inside[None, :], other=0.0)
        both = inside[:, None] & live[None, :]
        y = tl.dot(value, tl.load(weights + start * stride_in, mask=both, other=0.0), y)
        if GATED:
            second = tl.load(weights + OUT * stride_out + start * stride_in, mask=both, other=0.0)
            other = tl.dot(value, second, other)
    out += let_next_begin(AHEAD and LATE)
    at, there = m[:, None] * OUT + n[None, :], here[:, None] & live[None, :]
    if PARTS > 1:
        tl.store(out + tl.program_id(2) * rows * OUT + at, y, mask=there)
    else:
        if BIAS:
            y += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)[None, :]
        y = activate(y, ACT)
        if GATED:
            y *= other
        if RESIDUAL:
            y += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _sum_ahead(
    sums,
    bias,
    residual,
    out,
    count,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Adds the parts of sums in their order, and what follows the product."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + let_next_begin(AHEAD)
    there = at < count
    y = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        y += tl.load(bias + at % OUT, mask=there, other=0.0).to(tl.float32)
    last = wait_for_last(AHEAD)
    sums, residual = sums + last, residual + last
    for part in tl.static_range(PARTS):
        y += tl.load(sums + part * count + at, mask=there, other=0.0)
    y = activate(y, ACT)
    if RESIDUAL:
        y += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=there)
