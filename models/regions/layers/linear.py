"""Multiplies one new token a row by the weights of a linear layer, as decoders here do."""

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGE = 1 << 17  # weights; fewer stay in a CPU's cache, where the library's product is as fast


def linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,  # [out]
) -> Tensor:  # [..., out]
    """`torch.nn.functional.linear`.

    A single row's product takes as long as its weights take to be read. Compiled for a CPU it is a sum over each
    row of the weights, which Inductor writes as one loop; what MKL and oneDNN have for it reads at half that speed
    (benchmarks/NOTES.md). The row is stored first: else what it is made of is computed again for each of the sums.
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
    """The nearest bfloat16 numbers, in fp32 of any shape. The compiler leaves out a conversion there and back, and
    a head's logits would be others, and so its tokens, than those of the library's product in a larger bucket."""
    bits = x.view(torch.int32)
    return torch.where(x.isnan(), x, ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32))
