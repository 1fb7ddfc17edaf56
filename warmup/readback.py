"""What the host learns from the device without stopping it: the tokens of a step, and how long work took."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def event(timing: bool = False) -> torch.cuda.Event:
    """A place in the stream that the host can wait for."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class PendingTokens:
    """Tokens on their way to the host."""

    arrived: Callable[[], None]
    tokens: Tensor

    def result(self) -> list[int]:
        """One token a row; waits until the step that made them has ended, and for nothing after it."""
        self.arrived()
        values: list[int] = self.tokens.tolist()
        return values


class TokenReadback:
    """Copies tokens to the host right behind the step that makes them, so that the next one may overwrite them.

    Two copies may be under way: while the host reads one step's tokens, the device works on the next.
    """

    def __init__(self, tokens: Tensor) -> None:
        """``tokens``: the static buffer [slots] that every step writes."""
        self._tokens = tokens
        self._places: list[tuple[Tensor, torch.cuda.Event]] = []
        if tokens.is_cuda:
            self._places = [(torch.empty_like(tokens, device="cpu", pin_memory=True), event()) for _ in "ab"]

    def start(self, rows: int) -> PendingTokens:
        """Copy the first ``rows`` tokens as they are at this point of the stream."""
        if not self._places:
            return PendingTokens(_nothing, self._tokens[:rows].clone())
        self._places.reverse()
        host, event = self._places[0]
        host[:rows].copy_(self._tokens[:rows], non_blocking=True)
        event.record()
        return PendingTokens(event.synchronize, host[:rows])


class DeviceTimer:
    """Seconds that work takes on the device, from the timer's making to ``stop``.

    On CUDA by events in the stream, as the host is far ahead of the device; ``seconds`` waits for the later one.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = (event(timing=True), event(timing=True))
            self._events[0].record()
        self._started = self._stopped = time.perf_counter()

    def stop(self) -> "DeviceTimer":
        if self._events is not None:
            self._events[1].record()
        self._stopped = time.perf_counter()
        return self

    def seconds(self) -> float:
        if self._events is None:
            return self._stopped - self._started
        start, end = self._events
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


def _nothing() -> None:
    """On a CPU tokens are there when the step returns."""
