"""Maps the transformers names of activations to functions."""

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
