"""When a part is taken for stuck: by ticks, by what it does, and by what it said it was to do. No process."""

import os
import threading

import pytest
from support.servers.server_process import wait_until

from snapcap.service import watch
from snapcap.service.engine.remote.messages import Pulse
from snapcap.service.watch import LONG_WORK, EngineWatch, StalledError, Watchdog
from snapcap.warmup.errors import one_line, unexpected


def test_a_time_limit_is_over_after_as_many_ticks_and_never_before() -> None:
    for timeout in (1.0, 5.0, 30.0, 600.0):
        watchdog = Watchdog(timeout)
        ticks = 1
        while not watchdog.tick():
            ticks += 1
        assert timeout < watchdog.silent_s == ticks * watchdog.tick_s <= timeout + watchdog.tick_s


def test_what_goes_on_is_never_over_time() -> None:
    watchdog = Watchdog(10.0)
    for _ in range(1000):
        assert not watchdog.tick()
        watchdog.went_on()
    assert watchdog.silent_s == 0


def test_0_is_no_time_limit_but_still_counts() -> None:
    watchdog = Watchdog(0.0)
    assert not any(watchdog.tick() for _ in range(1000))
    assert watchdog.silent_s == 1000 * watchdog.tick_s


@pytest.mark.parametrize(("timeout", "tick_s"), [(30.0, 2.0), (4.0, 0.5), (0.001, 0.1), (0.0, 2.0)])
def test_a_tick_is_seldom_enough_to_cost_nothing(timeout: float, tick_s: float) -> None:
    assert Watchdog(timeout).tick_s == tick_s


class Watched:
    """An engine watch of 16 s, so a tick is 2 s, over an engine whose pulse the test sets."""

    def __init__(self) -> None:
        self.pulse: Pulse | None = Pulse()  # None: it does not answer
        self.waiting = False
        self.errors: list[StalledError] = []
        self.watch = EngineWatch(16.0, self._answer, lambda: self.waiting, self.errors.append)

    def _answer(self) -> None:
        if self.pulse is not None:
            self.watch.take(self.pulse)

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.watch.look()

    def ticks_until_stalled(self) -> int:
        count = 0
        while not self.errors and count < 1000:
            self.tick()
            count += 1
        return count


@pytest.fixture
def watched() -> Watched:
    return Watched()


def turn(watched: Watched, work: int = 0, doing: str = "") -> None:
    assert watched.pulse is not None
    watched.pulse = Pulse(watched.pulse.turns + 1, watched.pulse.work + work, doing)


def test_an_idle_engine_that_answers_is_left_alone(watched: Watched) -> None:
    for _ in range(100):
        turn(watched)
        watched.tick()
    assert watched.errors == []


def test_one_that_does_not_answer_is_stalled_once(watched: Watched) -> None:
    turn(watched)
    watched.tick()
    watched.pulse = None
    assert watched.ticks_until_stalled() == 9
    watched.tick(100)
    (error,) = watched.errors
    assert one_line(error) == "the engine has made no progress for 18 s, while it had nothing to do"
    assert unexpected(error) is None


def test_one_whose_reader_answers_for_a_thread_that_stands_still_is_stalled(watched: Watched) -> None:
    turn(watched)
    assert watched.ticks_until_stalled() == 10


def test_with_requests_a_turn_that_does_nothing_does_not_count(watched: Watched) -> None:
    """The thread spins, or has lost them."""
    watched.waiting = True
    for _ in range(20):
        turn(watched)
        watched.tick()
    (error,) = watched.errors
    assert str(error).endswith("while requests wait")


def test_with_requests_work_counts_however_slow(watched: Watched) -> None:
    watched.waiting = True
    for _ in range(50):
        turn(watched, work=1)
        watched.tick(7)
    assert watched.errors == []


def test_what_was_said_to_take_long_has_more_time_and_not_for_ever(watched: Watched) -> None:
    turn(watched, doing="make bucket 64 ready")
    watched.tick()
    assert watched.ticks_until_stalled() == LONG_WORK * 16 / watched.watch.tick_s + 1
    (error,) = watched.errors
    assert str(error).endswith("while it was to make bucket 64 ready")


def test_after_long_work_the_usual_limit_is_back(watched: Watched) -> None:
    turn(watched, doing="make bucket 64 ready")
    watched.tick(20)
    turn(watched, work=1)
    watched.tick()
    assert watched.watch.silent_s == 0
    assert watched.ticks_until_stalled() == 9


def test_a_log_that_nobody_reads_does_not_keep_a_stuck_server_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    read, sent = threading.Event(), list[int]()
    monkeypatch.setattr(watch._logger, "error", lambda *_, **__: read.wait(60))
    monkeypatch.setattr(watch, "_LINE_S", 0.05)
    monkeypatch.setattr(watch, "_LAST", ((watch.STACKS, 0.0), (watch.END, 0.0)))
    monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))
    watching = watch.LoopWatch(0.1, os.getppid())
    watching.start()
    try:
        wait_until(lambda: sent == [watch.STACKS, watch.END])
    finally:
        watching.stop()
        read.set()
