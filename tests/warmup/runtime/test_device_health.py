"""What an error says of the device that had it. A lost one needs a GPU: tests/gpu."""

import pytest
import torch

from snapcap.models.memory.torch_memory import TorchHostMemory
from snapcap.warmup.runtime.devices import CpuDevice


@pytest.mark.parametrize(
    ("error", "health"),
    [
        (RuntimeError("expected two tensors"), "failed"),
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
    ],
    ids=["failed", "python", "allocator", "driver"],
)
def test_a_cpu_has_failed_or_lacks_memory(error: Exception, health: str) -> None:
    assert CpuDevice(TorchHostMemory()).health(error) == health
