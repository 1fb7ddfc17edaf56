"""Requests that need a larger batch than is ready: they stand aside, come back in their place, or are refused."""

import threading
import time

import pytest
from support.fakes.scheduling import EOS, LIMITS, Clock, advance, request, submit

from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.errors import BeamsNotReady, DeadlineExceeded
from snapcap.warmup.plan.plan import BucketTable

PATIENCE = 30.0


@pytest.fixture
def cold(clock: Clock) -> Scheduler:
    """One row is ready; four and eight are to follow."""
    return Scheduler(BucketTable.of((1,)), LIMITS, clock, cold=(4, 8))


def step(scheduler: Scheduler) -> list[str]:
    """A step after which all that runs ends; returns who was admitted before it."""
    admitted = [row.request.id for row in scheduler.admit()]
    rows = scheduler.running
    hypotheses = {slot: [1, 7, EOS] for slot, row in enumerate(rows) if row.searches}
    advance(scheduler, rows, [EOS] * len(rows), "eager", hypotheses)
    return admitted


def returns(scheduler: Scheduler, seconds: float) -> bool:
    """Whether a device thread that waits goes on within so many seconds."""
    thread = threading.Thread(target=scheduler.wait, daemon=True)
    thread.start()
    thread.join(seconds)
    went_on = not thread.is_alive()
    scheduler.wake()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return went_on


def test_a_search_that_no_ready_batch_holds_is_passed(cold: Scheduler) -> None:
    submit(cold, request("search", num_beams=4), request("a"), request("b"))
    assert [step(cold), step(cold), step(cold)] == [["a"], ["b"], []]
    assert cold.depth == 1


def test_beams_that_nobody_asked_for_are_as_many_as_rows_are_ready(cold: Scheduler) -> None:
    cold.submit(request("default", num_beams=3, fewer_beams=True))
    assert [(row.request.id, row.request.params.num_beams) for row in cold.admit()] == [("default", 1)]
    advance(cold, cold.running, [EOS], "eager", {})
    cold.warmed(4)
    cold.submit(request("default", num_beams=3, fewer_beams=True))
    assert [row.request.params.num_beams for row in cold.admit()] == [3]


def test_nothing_spins_while_it_stands_aside(cold: Scheduler) -> None:
    cold.submit(request("search", num_beams=4))
    cold.wait()  # once, for the deadline that is new
    assert not returns(cold, 0.3)
    assert cold.admit() == []
    cold.submit(request("a"))
    assert returns(cold, PATIENCE)


def test_it_has_its_old_place_once_there_is_a_batch_and_nobody_passes_it_any_more(
    cold: Scheduler, clock: Clock
) -> None:
    for name, beams in (("eight", 8), ("four", 4), ("a", 1), ("b", 1)):
        cold.submit(request(name, num_beams=beams))
        clock.now += 1
    assert step(cold) == ["a"]
    cold.warmed(4)
    assert [step(cold), step(cold)] == [["four"], ["b"]]
    cold.submit(request("c"))
    cold.warmed(8)
    assert [step(cold), step(cold)] == [["eight"], ["c"]]
    assert cold.step_table.sizes == cold.encode_table.sizes == (1, 4, 8)


def test_a_stream_of_small_requests_does_not_starve_a_search(cold: Scheduler, clock: Clock) -> None:
    search = request("search", num_beams=4)
    cold.submit(search)
    for number in range(200):
        clock.now += 1
        cold.submit(request(number))
        if number == 100:
            cold.warmed(4)
        assert step(cold) == (["search"] if number == 100 else [str(number) if number < 100 else str(number - 1)])
        assert search.future.done() == (number >= 100)


def test_a_bucket_that_is_given_up_refuses_who_needs_it_and_nobody_else(cold: Scheduler) -> None:
    six, four, small = request("six", num_beams=6), request("four", num_beams=4), request("small")
    submit(cold, six, four, small)
    cold.give_up(8)
    error = six.future.exception(0)
    assert isinstance(error, BeamsNotReady)
    assert (error.status, error.headers()) == (503, {"Retry-After": "1"})
    assert "num_beams of at most 4" in error.detail
    assert not four.future.done()
    with pytest.raises(BeamsNotReady):
        cold.submit(request(num_beams=5))
    cold.warmed(4)
    assert [step(cold), step(cold)] == [["four"], ["small"]]


def test_a_smaller_bucket_that_is_given_up_leaves_the_larger_one_to_wait_for(cold: Scheduler) -> None:
    search = request("search", num_beams=3)
    cold.submit(search)
    cold.give_up(4)
    assert not search.future.done()
    cold.warmed(8)
    assert step(cold) == ["search"]


def test_without_any_cold_bucket_left_what_is_ready_is_the_limit(cold: Scheduler) -> None:
    search = request("search", num_beams=2)
    cold.submit(search)
    cold.give_up(4)
    cold.give_up(8)
    assert isinstance(search.future.exception(0), BeamsNotReady)
    assert cold.depth == 0
    submit(cold, request("a"))
    assert step(cold) == ["a"]


def test_who_stands_aside_has_a_deadline_and_may_leave(cold: Scheduler, clock: Clock) -> None:
    late = request("late", deadline=clock.now + 5, num_beams=4)
    left = request("left", num_beams=4)
    submit(cold, late, left)
    left.future.cancel()
    clock.now += 5
    cold.drop_lost()
    assert isinstance(late.future.exception(0), DeadlineExceeded)
    assert cold.depth == 0


def test_an_engine_that_waits_wakes_at_the_deadline_of_who_stands_aside() -> None:
    """On the real clock, as nothing else would wake it."""
    scheduler = Scheduler(BucketTable.of((1,)), LIMITS, cold=(4,))
    thread = threading.Thread(target=lambda: [scheduler.wait() for _ in range(2)], daemon=True)
    thread.start()
    scheduler.submit(request(deadline=time.monotonic() + 0.2, num_beams=4))
    thread.join(PATIENCE)
    assert not thread.is_alive()
    scheduler.drop_lost()
    assert scheduler.depth == 0


def test_the_engine_fails_who_stands_aside_too(cold: Scheduler) -> None:
    search = request(num_beams=4)
    cold.submit(search)
    cold.fail_all()
    assert search.future.exception(0) is not None
    assert cold.depth == 0
