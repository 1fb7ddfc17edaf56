"""Compiles a module inside a test's process, where other tests count what was compiled."""

import copy

import torch
from torch import Tensor


def run_compiled(module: torch.nn.Module, *inputs: Tensor) -> Tensor:
    """What the module gives once it is compiled; torch's counters are left as they were."""
    from torch._dynamo.utils import counters

    before = copy.deepcopy(counters)
    try:
        result: Tensor = torch.compile(module, fullgraph=True, dynamic=False)(*inputs)
        return result
    finally:
        counters.clear()
        counters.update(before)
