"""Copies the tokens of a step to the host without stopping the device, and times work on it."""

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
    """Tokens on their way to the host, and what beam searches have come to."""

    arrived: Callable[[], None]
    tokens: Tensor
    outcomes: Tensor | None = None

    def result(self) -> list[int]:
        """One token a row; waits until the step that made them has ended, and for nothing after it."""
        self.arrived()
        values: list[int] = self.tokens.tolist()
        return values

    def hypotheses(self) -> dict[int, list[int]]:
        """By slot, the best hypothesis of each search that has ended: the start token, the prompt, and what was
        generated with its end. Waits as ``result`` does."""
        if self.outcomes is None:
            return {}
        self.arrived()
        ended = self.outcomes[:, -1].nonzero().squeeze(1).tolist()
        return {slot: self.outcomes[slot, : self.outcomes[slot, -1]].tolist() for slot in ended}


class TokenReadback:
    """Copies tokens to the host right behind the step that makes them, so that the next one may overwrite them.

    Two copies may be under way: while the host reads one step's tokens, the device works on the next.
    """

    def __init__(self, tokens: Tensor) -> None:
        """``tokens``: the static buffer [slots] that every step writes."""
        self._tokens = tokens
        self._places: list[_Place] = [_Place(tokens), _Place(tokens)] if tokens.is_cuda else []

    def start(self, rows: int, outcomes: Tensor | None = None) -> PendingTokens:
        """Copy the first ``rows`` tokens as they are at this point of the stream.

        ``outcomes``: the static buffer [slots, L + 1] of beam searches, when a row is one.
        """
        if not self._places:
            copied = None if outcomes is None else outcomes[:rows].clone()
            return PendingTokens(_nothing, self._tokens[:rows].clone(), copied)
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
            copied = self._outcomes[:rows].copy_(outcomes, non_blocking=True)
        self._event.record()
        return PendingTokens(self._event.synchronize, self._tokens[:rows], copied)


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
