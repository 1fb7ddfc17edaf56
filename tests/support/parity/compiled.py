"""Compiles a module inside a test's process, where other tests count what was compiled."""

import copy

import torch
from torch import Tensor


def run_compiled(module: torch.nn.Module, *inputs: Tensor) -> Tensor:
    """Returns the result of the compiled module. Leaves torch's counters unchanged."""
    from torch._dynamo.utils import counters

    before = copy.deepcopy(counters)
    try:
        result: Tensor = torch.compile(module, fullgraph=True, dynamic=False)(*inputs)
        return result
    finally:
        counters.clear()
        counters.update(before)
