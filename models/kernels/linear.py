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

from snapcap.models.kernels.launch import activate, launch, normalised, pointer

# With up to this many rows, a row is a vector and a program holds whole rows of the weight. Tensor cores pay off
# with more rows.
FEW_ROWS = 2
# From this many rows on, a separate launch of the norm is cheaper: otherwise many programs would normalise the
# same rows.
_SEPARATE_NORM = 32
_MOST_INPUTS = 4096  # the weights of more do not fit in a program's registers


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
    ``FEW_ROWS`` rows, the result is rounded only once. With more rows, norm(x) is rounded too.
    """
    rows, inputs = x.shape
    parts = 2 if gated else 1
    outputs = weight.shape[1] // parts
    if rows >= _SEPARATE_NORM and gamma is not None:
        x, gamma = launch_norm(x, gamma, beta, eps), None
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    operands = (x, weight, pointer(bias, x), pointer(gamma, x), pointer(beta, x), pointer(residual, x), out)
    strides = weight.stride()
    flags = {
        "BIAS": bias is not None,
        "NORM": gamma is not None,
        "CENTRED": beta is not None,
        "RESIDUAL": residual is not None,
        "GATED": gated,
        "ACT": act,
        "EPS": eps,
    }
    if rows <= FEW_ROWS:
        padded = triton.next_power_of_2(inputs)
        block = 2 if padded > 2048 else (4 if parts * outputs < 2048 else 8) // parts
        launch(_few_rows)[(triton.cdiv(outputs, block),)](
            *operands, *strides, ROWS=rows, IN=inputs, OUT=outputs, PADDED=padded, BN=block, **flags, num_warps=8
        )
        return out
    if gated:
        tile = {"BN": 32, "BK": 64, "num_warps": 4, "num_stages": 4}
    elif rows < _SEPARATE_NORM:
        tile = {"BN": 16 if outputs < 2048 else 32, "BK": 256, "num_warps": 4, "num_stages": 3}
    else:
        tile = {"BN": 32 if outputs < 2048 else 64, "BK": 128, "num_warps": 8, "num_stages": 4}
    grid = (triton.cdiv(outputs, tile["BN"]), triton.cdiv(rows, 16))
    launch(_many_rows)[grid](*operands, rows, *strides, IN=inputs, OUT=outputs, **tile, **flags)
    return out


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
    launch(_norm)[(rows,)](x, gamma, pointer(beta, x), out, EPS=eps, **sizes, num_warps=4)
    return out


@triton.jit
def _norm(x, gamma, beta, out, EPS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, CENTRED: tl.constexpr):
    k = tl.arange(0, PADDED)
    inside = k < WIDTH
    at = tl.program_id(0) * WIDTH + k
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(gamma + k, mask=inside, other=0.0).to(tl.float32)
    shift = scale
    if CENTRED:
        shift = tl.load(beta + k, mask=inside, other=0.0).to(tl.float32)
    y = normalised(value, inside, scale, shift, EPS, WIDTH, CENTRED)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _few_rows(
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
):
    """Computes BN outputs of every row. The weights are loaded first: their loads depend on nothing else."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
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
def _many_rows(
    x,
    weight,
    bias,
    gamma,
    beta,
    residual,
    out,
    rows,
    stride_in,
    stride_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EPS: tl.constexpr,
):
    """Computes BN outputs of 16 rows, the fewest that tensor cores take. More rows are more programs."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * 16 + tl.arange(0, 16)
    k = tl.arange(0, BK)
    live, here = n < OUT, m < rows
    values = x + m[:, None] * IN + k[None, :]
    if NORM:
        total = tl.zeros([16], tl.float32)
        squares = tl.zeros([16], tl.float32)
        for start in range(0, IN, BK):
            value = tl.load(values + start, mask=here[:, None] & (start + k < IN)[None, :], other=0.0)
            total += tl.sum(value.to(tl.float32), 1)
            squares += tl.sum(value.to(tl.float32) * value.to(tl.float32), 1)
        mean = total / IN if CENTRED else tl.zeros([16], tl.float32)
        deviation = tl.rsqrt(squares / IN - mean * mean + EPS)
    y = tl.zeros([16, BN], tl.float32)
    if GATED:
        other = tl.zeros([16, BN], tl.float32)
    weights = weight + k[:, None] * stride_in + n[None, :] * stride_out
    for start in range(0, IN, BK):
        inside = start + k < IN
        value = tl.load(values + start, mask=here[:, None] & inside[None, :], other=0.0)
        if NORM:
            scale = tl.load(gamma + start + k, mask=inside, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) - mean[:, None]) * deviation[:, None] * scale[None, :]
            if CENTRED:
                value += tl.load(beta + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
            value = value.to(weight.dtype.element_ty)
        both = inside[:, None] & live[None, :]
        y = tl.dot(value, tl.load(weights + start * stride_in, mask=both, other=0.0), y)
        if GATED:
            second = tl.load(weights + OUT * stride_out + start * stride_in, mask=both, other=0.0)
            other = tl.dot(value, second, other)
    if BIAS:
        y += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)[None, :]
    y = activate(y, ACT)
    if GATED:
        y *= other
    at, there = m[:, None] * OUT + n[None, :], here[:, None] & live[None, :]
    if RESIDUAL:
        y += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=there)
