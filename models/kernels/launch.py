"""Provides the kernels' launch, and arithmetic that several kernels share."""

from typing import Any

import triton
import triton.language as tl
from torch.library import wrap_triton


def launch(kernel: Any) -> Any:
    """Returns the kernel in the form that an operator's body launches: a tracer can record it, Triton or its
    interpreter run it."""
    return wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def pointer(tensor: Any, instead: Any) -> Any:
    """Returns ``tensor``, or ``instead`` if it is None. A kernel must be told that the tensor is missing, and then
    never reads ``instead``."""
    return instead if tensor is None else tensor


@triton.jit
def activate(y, ACT: tl.constexpr):
    """Computes an activation of fp32 values, by its name in `layers.fused`; "" is none."""
    if ACT == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # tanh(z) = 2 sigmoid(2 z) - 1
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACT == "relu":
        y = tl.maximum(y, 0.0)
    elif ACT == "silu":
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def normalised(value, inside, gamma, beta, eps, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    """Computes the norm of one row: layer norm if ``CENTRED``, else RMSNorm, which has no ``beta``. The row and the
    parameters are in registers."""
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * gamma
    if CENTRED:
        value += beta
    return value
