"""Maps the transformers names of activations to functions, and computes linear layers, also by weights of int8."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        # On a CPU, sigmoid takes half as long as tanh: 1 + tanh y = 2 sigmoid 2y.
        return x * (math.sqrt(8.0 / math.pi) * (x + 0.044715 * x * x * x)).sigmoid()
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def _gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + (x * math.sqrt(2.0 / math.pi) * (1.0 + 0.044715 * x * x)).tanh())


def activation(name: str) -> Activation:
    """Returns the elementwise function of a name in ``models.config.ACTIVATIONS``. The function takes any shape.

    ``gelu_new`` and ``gelu_pytorch_tanh`` are the same tanh approximation (Hendrycks and Gimpel, 2016).
    transformers computes the first from elementary operations, PyTorch has a kernel for it.
    """
    table: dict[str, Activation] = {
        "gelu": F.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "gelu_fast": _gelu_fast,
        "quick_gelu": _quick_gelu,
        "relu": F.relu,
        "silu": F.silu,
        "swish": F.silu,
    }
    return table[name]


ALL = slice(None)
_SCALE_BYTES = 4  # an output has one scale, in fp32
_MOST = 127  # so that a number and its negative are both there


def quantised(
    weight: Tensor,  # [out, in], of floating-point numbers
) -> Tensor:  # [out * in + 4 * out] int8
    """Rounds a linear layer's weight to int8, in steps of an output's largest number / 127.

    The weight becomes one tensor, so that a region takes as many weights in int8 as in fp32: the rounded numbers
    [out, in], then the steps [out] as the bytes of fp32 numbers. ``linear`` reads both.
    """
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / _MOST
    steps = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
    rounded = (weight / steps).round().to(torch.int8)
    return torch.cat((rounded.flatten(), scale.contiguous().view(torch.int8)))


_LARGE = 1 << 17  # number of weights below which they stay in a CPU's cache, where the library's product is as fast


def linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out, in], or int8 as `quantised` returns it
    bias: Tensor | None = None,  # [out]
    outputs: slice = ALL,
) -> Tensor:  # [..., out], or the outputs in the slice
    """Computes `torch.nn.functional.linear`, or some outputs of it.

    With weights of int8, torch multiplies in fp32. Packages run on the CPU library, which rounds each row of ``x``
    to 8 bits, except a few large numbers, and adds integers.

    The product of a single row takes as long as reading the weights. Compiled for a CPU, it is a sum over each row
    of the weights, which Inductor writes as one loop. MKL and oneDNN read the weights at half the speed of this
    loop (benchmarks/NOTES.md). The input row is stored first: otherwise the compiler would compute it again for
    each sum.
    """
    bias = None if bias is None else bias[outputs]
    if weight.dtype == torch.int8:
        return _linear_int8(x, weight, bias, outputs)
    weight = weight[outputs]
    compiled = torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype != torch.float16
    if not compiled or x.numel() != x.shape[-1] or weight.numel() < _LARGE:
        return F.linear(x, weight, bias)
    row = x.float().flatten()
    products = (weight.float() * row.as_strided(row.shape, row.stride())).sum(-1)
    total = products if bias is None else products + bias.float()
    rounded = _rounded(total) if x.dtype == torch.bfloat16 else total
    return rounded.to(x.dtype).view(*x.shape[:-1], -1)


def _linear_int8(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: slice) -> Tensor:
    inputs = x.shape[-1]
    end = weight.shape[0] // (inputs + _SCALE_BYTES) * inputs
    numbers, scale = weight[:end].view(-1, inputs)[outputs], weight[end:].view(torch.float32)[outputs]
    if not torch.compiler.is_exporting():
        # Only the CPU library has a fast product for this operation. torch's takes twenty times as long as these.
        return F.linear(x, numbers.float() * scale.unsqueeze(1), bias)
    product = torch._weight_int8pack_mm(x.reshape(-1, inputs), numbers, scale).view(*x.shape[:-1], -1)
    return product if bias is None else product + bias


def _rounded(x: Tensor) -> Tensor:
    """Rounds fp32 numbers to the nearest bfloat16 numbers, and returns them in fp32; any shape.

    A conversion to bfloat16 and back would be removed by the compiler. The logits, and so the tokens, would then
    differ from those of the library's product in a larger bucket.
    """
    bits = x.view(torch.int32)
    return torch.where(x.isnan(), x, ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32))
