"""Drives a CUDA device with torch: copies, events and graphs on the current stream."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snapcap.models.dataclass import dataclass
from snapcap.models.memory.torch_memory import TorchDeviceMemory
from snapcap.warmup.runtime.devices.device import Captured, DeviceHealth, PendingTokens, Pixels


class CudaDevice:
    """A `Device` that works while the host goes on."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph_pool: Any = None  # made with the first graph; all share it, as only one runs at a time
        self.memory = TorchDeviceMemory(device)
        self._probe = self.memory.zeros("uint8", (1,))

    def staging(self, pixels: Tensor, slots: Tensor) -> "_Staging":
        return _Staging(pixels, slots)

    def readback(self, tokens: Tensor) -> "_Readback":
        return _Readback(tokens)

    def read(self, buffer: Tensor) -> "np.ndarray[Any, Any]":
        return buffer.cpu().numpy()

    def record(self, run: Callable[[], Tensor]) -> Captured[Tensor]:
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: threads that decode images must not break a capture that they have no part in.
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            output = run()
        return _Graph(graph, output)

    def timer(self) -> "_Timer":
        return _Timer()

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def health(self, error: Exception) -> DeviceHealth:
        """A kernel's error is known only at its end, so this waits for it."""
        try:
            self.wait()
            self._probe.tolist()  # a copy to the host, which needs no memory of the device
        except Exception:
            return "lost"
        # The driver's own refusal has no class of its own.
        memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
        return "out_of_memory" if memory else "failed"

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.output


class _Staging:
    """Copies from pinned memory on a stream of its own, so that the work before a batch goes on meanwhile:

    copies    [ batch 2 → arrival ]           [ batch 3 → arrival ]
    compute   [ encode 1, steps ][ take ][ encode 2, steps ][ take ]…
    """

    def __init__(self, pixels: Tensor, slots: Tensor) -> None:
        self._targets = (pixels, slots)
        self._host = tuple(torch.zeros_like(t, device="cpu", pin_memory=True) for t in self._targets)
        self._arrival = tuple(torch.empty_like(target) for target in self._targets)
        self._stream = torch.cuda.Stream(pixels.device)  # type: ignore[no-untyped-call]
        self._arrived, self._taken = event(), event()

    def copy(self, images: Sequence[Pixels], slots: Sequence[int]) -> None:
        pixels, host_slots = self._host
        self._arrived.synchronize()  # the host's buffers have been read
        np.stack(images, out=pixels[: len(images)].numpy())
        host_slots[: len(slots)].numpy()[:] = slots
        batch = (pixels[: len(images)], host_slots[: len(slots)])
        arrival = [place[: len(source)] for place, source in zip(self._arrival, batch, strict=True)]
        with torch.cuda.stream(self._stream):
            self._taken.wait()
            for place, source in zip(arrival, batch, strict=True):
                place.copy_(source, non_blocking=True)
            self._arrived.record()
        self._arrived.wait()
        for target, place in zip(self._targets, arrival, strict=True):
            target[: len(place)].copy_(place, non_blocking=True)
        self._taken.record()


class _Readback:
    """Two copies may be under way: while the host reads one step's tokens, the device works on the next."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._places = [_Place(tokens), _Place(tokens)]

    def start(self, rows: int, outcomes: Tensor | None = None) -> PendingTokens:
        self._places.reverse()
        return self._places[0].copy(self._tokens[:rows], None if outcomes is None else outcomes[:rows])


class _Place:
    """Pinned memory for one step's results."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = torch.empty_like(tokens, device="cpu", pin_memory=True)
        self._outcomes: Tensor | None = None
        self._event = event()

    def copy(self, tokens: Tensor, outcomes: Tensor | None) -> PendingTokens:
        rows = len(tokens)
        self._tokens[:rows].copy_(tokens, non_blocking=True)
        copied = None
        if outcomes is not None:
            if self._outcomes is None:
                shape = (len(self._tokens), outcomes.shape[1])
                self._outcomes = torch.empty(shape, dtype=outcomes.dtype, pin_memory=True)
            copied = self._outcomes[:rows].copy_(outcomes, non_blocking=True).numpy()
        self._event.record()
        return PendingTokens(self._event.synchronize, self._tokens[:rows].numpy(), copied)


class _Timer:
    """By events in the stream, as the host is far ahead of the device."""

    def __init__(self) -> None:
        self._start, self._end = event(timing=True), event(timing=True)
        self._start.record()

    def stop(self) -> "_Timer":
        self._end.record()
        return self

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000.0


def event(timing: bool = False) -> torch.cuda.Event:
    """A place in the stream that the host can wait for."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
