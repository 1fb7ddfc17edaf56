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
    compiled = torch.compiler.is_compiling() and x.device.type == "cpu"
    if not compiled or x.numel() != x.shape[-1] or weight.numel() < _LARGE:
        return F.linear(x, weight, bias)
    row = x.float().flatten()
    products = (weight.float() * row.as_strided(row.shape, row.stride())).sum(-1)
    return (products if bias is None else products + bias.float()).to(x.dtype).view(*x.shape[:-1], -1)
