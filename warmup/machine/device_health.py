"""Tells an error that a device survives from one after which it answers nothing any more."""

from typing import Literal

import torch
from torch import Tensor

# "failed": it answers, so what failed was the work. "lost": every later call fails too (a CUDA error that sticks:
# a kernel's assertion, an illegal address, a GPU that has fallen off its bus); only a new process can go on.
DeviceHealth = Literal["failed", "out_of_memory", "lost"]


def device_health(buffer: Tensor, error: Exception) -> DeviceHealth:
    """What an error of a step says of the device that ``buffer`` is on; waits for it, as a kernel's error is known
    only at its end."""
    try:
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        buffer[:1].tolist()  # a copy to the host, which needs no memory of the device
    except Exception:
        return "lost"
    # The driver's own refusal has no class of its own.
    memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    return "out_of_memory" if memory else "failed"
