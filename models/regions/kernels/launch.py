"""What all kernels share: how they are launched, and the arithmetic that several of them end with."""

from typing import Any

import triton
import triton.language as tl
from torch.library import wrap_triton


def launch(kernel: Any) -> Any:
    """The kernel as an operator's body launches it: recorded by a tracer, run by Triton or its interpreter."""
    return wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def pointer(tensor: Any, instead: Any) -> Any:
    """A tensor that may be missing; a kernel that is told so never reads what it is given in its place."""
    return instead if tensor is None else tensor


@triton.jit
def activate(y, ACT: tl.constexpr):
    """An activation of fp32 values by the name that `regions.fused.activations` gives it; "" for none."""
    if ACT == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # tanh(z) = 2 sigmoid(2 z) - 1
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACT == "relu":
        y = tl.maximum(y, 0.0)
    return y


@triton.jit
def normalised(value, inside, gamma, beta, eps, WIDTH: tl.constexpr):
    """Layer norm of one row in registers; ``gamma`` and ``beta`` are in registers too."""
    mean = tl.sum(value, 0) / WIDTH
    centred = tl.where(inside, value - mean, 0.0)
    return centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps) * gamma + beta
