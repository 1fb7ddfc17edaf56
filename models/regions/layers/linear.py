"""Computes the linear layers of a decode step, which has one new token a row."""

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGE = 1 << 17  # number of weights below which they stay in a CPU's cache, where the library's product is as fast


def linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,  # [out]
) -> Tensor:  # [..., out]
    """Computes `torch.nn.functional.linear`.

    The product of a single row takes as long as reading the weights. Compiled for a CPU, it is a sum over each row
    of the weights, which Inductor writes as one loop. MKL and oneDNN read the weights at half the speed of this
    loop (benchmarks/NOTES.md). The input row is stored first: otherwise the compiler would compute it again for
    each sum.
    """
    compiled = torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype != torch.float16
    if not compiled or x.numel() != x.shape[-1] or weight.numel() < _LARGE:
        return F.linear(x, weight, bias)
    row = x.float().flatten()
    products = (weight.float() * row.as_strided(row.shape, row.stride())).sum(-1)
    total = products if bias is None else products + bias.float()
    rounded = _rounded(total) if x.dtype == torch.bfloat16 else total
    return rounded.to(x.dtype).view(*x.shape[:-1], -1)


def _rounded(x: Tensor) -> Tensor:
    """Rounds fp32 numbers to the nearest bfloat16 numbers, and returns them in fp32; any shape.

    A conversion to bfloat16 and back would be removed by the compiler. The logits, and so the tokens, would then
    differ from those of the library's product in a larger bucket.
    """
    bits = x.view(torch.int32)
    return torch.where(x.isnan(), x, ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32))
