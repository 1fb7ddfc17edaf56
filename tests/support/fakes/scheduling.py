"""Makes requests for a scheduler, and a clock that the test moves. No torch."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from snapcap.service.engine.request import CaptionRequest, Limits
from snapcap.service.engine.scheduler import RunningRequest, Scheduler
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.slot_request import SamplingParams

EOS = 2
LIMITS = Limits(cache_length=20, default_new_tokens=6, eos_ids=frozenset({EOS}))
TABLE = BucketTable.of((1, 4))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(
    name: object = "r", prompt: tuple[int, ...] = (), deadline: float = 1e9, **params: Any
) -> CaptionRequest:
    pixels: Any = None
    return CaptionRequest(str(name), pixels, prompt, SamplingParams(**params), deadline, Future())


def submit(scheduler: Scheduler, *requests: CaptionRequest) -> None:
    for each in requests:
        scheduler.submit(each)


def advance(
    scheduler: Scheduler,
    rows: Sequence[RunningRequest],
    tokens: Sequence[int],
    backend: str,
    hypotheses: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> list[tuple[int, int]]:
    """Calls ``Scheduler.advance``, and hands the results out at once."""
    results: list[Callable[[], None]] = []
    moves = scheduler.advance(rows, tokens, backend, hypotheses, results)
    for hand_out in results:
        hand_out()
    return moves


def names(scheduler: Scheduler) -> list[str]:
    return [row.request.id for row in scheduler.running]
