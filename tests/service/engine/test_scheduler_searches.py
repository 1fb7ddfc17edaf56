"""Beam searches in the scheduler: they come, run and leave with all their slots at once."""

import pytest
from support.fakes.scheduling import EOS, LIMITS, Clock, advance, names, request, submit

from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.errors import EngineFailed
from snapcap.warmup.plan.plan import BucketTable


def test_a_search_takes_as_many_slots_as_it_has_beams_behind_the_others_first_ones(scheduler: Scheduler) -> None:
    submit(scheduler, request("a", num_beams=2), request("b", num_beams=2))
    (first,), (second,) = scheduler.admit(), scheduler.admit()
    assert names(scheduler) == ["a", "a", "b", "b"]
    assert (scheduler.slots_of(first), scheduler.slots_of(second)) == ([0, 1], [2, 3])


def test_searches_that_are_admitted_together_have_their_first_rows_in_order(clock: Clock) -> None:
    scheduler = Scheduler(BucketTable.of((2, 8)), LIMITS, clock)
    submit(scheduler, request("a", num_beams=3), request("b"), request("c", num_beams=2))
    scheduler.admit()
    scheduler.admit()
    assert names(scheduler) == ["a", "b", "a", "a", "c", "c"]


def test_a_search_without_room_waits_and_nobody_passes_it(scheduler: Scheduler) -> None:
    submit(scheduler, request("a"), request("b", num_beams=4), request("c"))
    assert [row.request.id for row in scheduler.admit()] == ["a"]
    assert scheduler.admit() == []
    assert scheduler.depth == 2
    advance(scheduler, scheduler.running, [EOS], "eager")
    assert [row.request.id for row in scheduler.admit()] == ["b"]
    assert scheduler.admit() == []
    advance(scheduler, scheduler.running, [5] * 4, "eager", {2: [1, 7, EOS]})
    assert [row.request.id for row in scheduler.admit()] == ["c"]


def test_a_search_has_its_tokens_when_it_ends_and_frees_all_its_slots(scheduler: Scheduler) -> None:
    found, cut, lone = request("found", prompt=(8, 9), num_beams=2), request("cut", num_beams=1), request("lone")
    submit(scheduler, found, cut, lone)
    scheduler.admit()
    scheduler.admit()
    assert names(scheduler) == ["found", "cut", "lone", "found"]
    advance(scheduler, scheduler.running, [EOS, 5, 6, EOS], "aot")  # a beam's own tokens are not the search's
    assert not found.future.done()
    moves = advance(scheduler, scheduler.running, [1, 5, 6, 1], "aot", {3: [1, 8, 9, 30, 31, EOS]})
    completion = found.future.result(0)
    assert (completion.tokens, completion.finish_reason, completion.backend) == ((30, 31), "stop", "aot")
    assert (moves, names(scheduler)) == ([(2, 0)], ["lone", "cut"])


def test_a_search_that_ends_at_its_length_says_so(scheduler: Scheduler) -> None:
    sent = request(num_beams=2, max_new_tokens=3)
    scheduler.submit(sent)
    scheduler.admit()
    advance(scheduler, scheduler.running, [5, 5], "eager", {0: [1, 30, 31, 32]})
    completion = sent.future.result(0)
    assert (completion.tokens, completion.finish_reason) == ((30, 31, 32), "length")


@pytest.mark.parametrize("end", ["deadline", "left"])
def test_a_search_that_is_lost_frees_all_its_slots(scheduler: Scheduler, clock: Clock, end: str) -> None:
    sent = request("s", deadline=clock.now + (1 if end == "deadline" else 9), num_beams=3)
    submit(scheduler, sent, request("r"))
    scheduler.admit()
    scheduler.admit()
    clock.now += 1
    if end == "left":
        sent.future.cancel()
    assert scheduler.drop_lost() == [(3, 0)]
    assert names(scheduler) == ["r"]
    assert advance(scheduler, [*scheduler.running], [7], "eager") == []


def test_a_step_counts_once_for_a_search(scheduler: Scheduler) -> None:
    scheduler.submit(request(num_beams=3, max_new_tokens=4))
    scheduler.admit()
    for _ in range(4):
        assert scheduler.needs_step()
        assert len(scheduler.launched()) == 3
    assert not scheduler.needs_step()


def test_a_failed_step_fails_a_search_once(scheduler: Scheduler) -> None:
    sent = request(num_beams=4)
    scheduler.submit(sent)
    scheduler.admit()
    scheduler.fail_running(EngineFailed())
    assert isinstance(sent.future.exception(0), EngineFailed)
    assert scheduler.running == []
