"""Drives a CPU, where work is done when its call returns and the host reaches every buffer. No torch."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np

from snapcap.models.memory.host import HostMemory
from snapcap.models.memory.memory import B
from snapcap.warmup.runtime.devices.device import Captured, DeviceHealth, PendingTokens, Pixels


class CpuDevice(Generic[B]):
    """A `Device` over the memory of the host."""

    runs_ahead = False

    def __init__(self, memory: HostMemory[B]) -> None:
        self.memory = memory

    def staging(self, pixels: B, slots: B) -> "_Staging":
        return _Staging(self.memory.array(pixels), self.memory.array(slots))

    def readback(self, tokens: B) -> "_Readback[B]":
        return _Readback(self.memory, tokens)

    def read(self, buffer: B) -> "np.ndarray[Any, Any]":
        return self.memory.array(buffer).copy()

    def record(self, run: Callable[[], B]) -> Captured[B]:
        raise NotImplementedError("a CPU records no launches")

    def timer(self) -> "CpuTimer":
        return CpuTimer()

    def wait(self) -> None:
        """Does nothing: a CPU has finished when a call returns."""

    def health(self, error: Exception) -> DeviceHealth:
        memory = isinstance(error, MemoryError) or "out of memory" in str(error)
        return "out_of_memory" if memory else "failed"

    def allocated_bytes(self) -> int:
        return 0


class CpuTimer:
    """Times what is done meanwhile."""

    def __init__(self) -> None:
        self._started = self._stopped = time.perf_counter()

    def stop(self) -> "CpuTimer":
        self._stopped = time.perf_counter()
        return self

    def seconds(self) -> float:
        return self._stopped - self._started


class _Staging:
    def __init__(self, pixels: "np.ndarray[Any, Any]", slots: "np.ndarray[Any, Any]") -> None:
        self._pixels, self._slots = pixels, slots

    def copy(self, images: Sequence[Pixels], slots: Sequence[int]) -> None:
        np.stack(images, out=self._pixels[: len(images)])
        self._slots[: len(slots)] = slots


class _Readback(Generic[B]):
    def __init__(self, memory: HostMemory[B], tokens: B) -> None:
        self._memory, self._tokens = memory, memory.array(tokens)

    def start(self, rows: int, outcomes: B | None = None) -> PendingTokens:
        copied = None if outcomes is None else self._memory.array(outcomes)[:rows].copy()
        return PendingTokens(_nothing, self._tokens[:rows].copy(), copied)


def _nothing() -> None:
    """The tokens are there when the step returns."""
