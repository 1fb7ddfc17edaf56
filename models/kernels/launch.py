"""Provides the kernels' launch, and arithmetic that several kernels share."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton


def launch(kernel: Any) -> Any:
    """Returns the kernel in the form that an operator's body launches: a tracer can record it, Triton or its
    interpreter run it."""
    return wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def pointer(tensor: Any, instead: Any) -> Any:
    """Returns ``tensor``, or ``instead`` if it is None. A kernel must be told that the tensor is missing, and then
    never reads ``instead``."""
    return instead if tensor is None else tensor


def ahead(x: Tensor) -> bool:
    """Returns whether kernels on the device of ``x`` may begin before the kernel in front of them has ended: from
    compute capability 9.0 on. Kernels named ``…_ahead`` take this as ``AHEAD``, and a graph of a decode step
    launches them so (programmatic dependent launch)."""
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (9, 0)


# Inductor takes a kernel with assembly that has side effects for one that may write to all its inputs, and copies
# them. So the assembly of the next two functions has no side effects by its words. Each returns an offset of 0, and
# what must come behind it is addressed with this offset. A compiler knows no more of it than that it is a multiple
# of 128.


@triton.jit
def let_next_begin(AHEAD: tl.constexpr, after=None):
    """Lets the kernel behind this one begin, once ``after`` (fp32, a scalar) is computed. Programs of that kernel
    wait in turn, but take place beside the programs of this one. Returns 0."""
    zero = 0
    if AHEAD:
        if after is None:
            zero = tl.inline_asm_elementwise(
                "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            zero = tl.inline_asm_elementwise(
                "griddepcontrol.launch_dependents; mov.u32 $0, 0; // $1",
                "=r,f",
                [after],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
    return zero * 128


@triton.jit
def wait_for_last(AHEAD: tl.constexpr):
    """Waits until the kernel in front has ended and its results can be read. Returns 0, which every address of its
    results is computed with.

    Other loads may only read what no kernel of the same graph writes, such as weights. Every program must wait, so
    that the end of a kernel implies the end of all kernels before it.
    """
    zero = 0
    if AHEAD:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
        )
    return zero * 128


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
