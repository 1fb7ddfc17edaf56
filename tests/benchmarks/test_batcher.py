"""The batcher of the peers without one: what goes together, and what becomes of errors."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from snapcap.benchmarks.peers.transformers_server import Batcher

LIMIT_S = 10.0


class Runner:
    """Doubles numbers; ``hold`` keeps a batch running until it is set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.running = threading.Event()
        self.hold = threading.Event()

    def __call__(self, batch: Sequence[int]) -> list[int]:
        self.batches.append(list(batch))
        self.running.set()
        assert self.hold.wait(LIMIT_S)
        if -1 in batch:
            raise ValueError("negative")
        return [2 * item for item in batch]


def held_batcher(runner: Runner, most: int) -> "tuple[Batcher[int, int], Future[int]]":
    """A batcher whose only worker runs a first request, which is not done before ``hold``."""
    batcher: Batcher[int, int] = Batcher(runner, most)
    first = batcher.submit(1)
    assert runner.running.wait(LIMIT_S)
    return batcher, first


def test_a_lone_request_runs_at_once() -> None:
    runner = Runner()
    runner.hold.set()
    assert Batcher(runner, 4).submit(3).result(LIMIT_S) == 6
    assert runner.batches == [[3]]


def test_what_waits_goes_together_and_each_gets_its_own_answer() -> None:
    runner = Runner()
    batcher, first = held_batcher(runner, most=4)
    others = [batcher.submit(item) for item in range(2, 8)]
    runner.hold.set()
    assert [each.result(LIMIT_S) for each in (first, *others)] == [2, 4, 6, 8, 10, 12, 14]
    assert runner.batches == [[1], [2, 3, 4, 5], [6, 7]]


def test_an_error_is_of_its_batch_alone() -> None:
    runner = Runner()
    batcher, _ = held_batcher(runner, most=2)
    wrong, beside, later = (batcher.submit(item) for item in (-1, 2, 3))
    runner.hold.set()
    for future in (wrong, beside):
        with pytest.raises(ValueError, match="negative"):
            future.result(LIMIT_S)
    assert later.result(LIMIT_S) == 6


def test_who_has_gone_away_is_not_run_for() -> None:
    runner = Runner()
    batcher, _ = held_batcher(runner, most=2)
    gone = [batcher.submit(item) for item in (2, 3)]
    later = batcher.submit(4)
    assert all(each.cancel() for each in gone)
    runner.hold.set()
    assert later.result(LIMIT_S) == 8
    assert runner.batches == [[1], [4]]
