"""Admission, deadlines, compaction and completion, on a clock that the test moves; no torch."""

from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
from support.fakes.scheduling import EOS, TABLE, Clock, advance, names, request, submit

from snapcap.service.engine.request import Completion, Limits
from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.errors import DeadlineExceeded, EngineFailed, NotReady


def test_first_come_is_first_served_into_the_next_free_slots(scheduler: Scheduler) -> None:
    submit(scheduler, *(request(name) for name in "abcdef"))
    assert [row.request.id for row in scheduler.admit()] == list("abcd")
    assert scheduler.admit() == []  # no slot is free
    assert scheduler.depth == 2
    advance(scheduler, scheduler.running, [EOS, 5, EOS, 5], "eager")
    assert [row.request.id for row in scheduler.admit()] == ["e"]  # the smallest bucket is filled, "f" follows
    assert [row.request.id for row in scheduler.admit()] == ["f"]
    assert sorted(names(scheduler)) == ["b", "d", "e", "f"]


def test_nothing_waits_nothing_is_admitted(scheduler: Scheduler) -> None:
    assert scheduler.admit() == []
    assert advance(scheduler, scheduler.running, [], "eager") == []


def test_a_table_that_grows_gives_more_slots(scheduler: Scheduler) -> None:
    submit(scheduler, *(request(name) for name in "abcdef"))
    scheduler.admit()
    scheduler.warmed(6)
    submitted = scheduler.admit() + scheduler.admit()
    assert [row.request.id for row in submitted] == ["e", "f"]


def test_a_completion_has_the_tokens_without_the_end_and_where_the_time_went(
    scheduler: Scheduler, clock: Clock
) -> None:
    wanted = request()
    scheduler.submit(wanted)
    clock.now += 3.0
    (row,) = scheduler.admit()
    row.encode_s = 0.5
    advance(scheduler, scheduler.running, [7], "aot")
    clock.now += 2.0
    advance(scheduler, scheduler.running, [EOS], "aot")
    assert wanted.future.result(0) == Completion((7,), "stop", "aot", 3.0, 0.5, 1.5)


@pytest.mark.parametrize(("wanted", "expected"), [(None, 6), (1, 1), (9, 9), (19, 19)])
def test_a_row_ends_at_its_length(scheduler: Scheduler, wanted: int | None, expected: int) -> None:
    sent = request(max_new_tokens=wanted)
    scheduler.submit(sent)
    scheduler.admit()
    for token in range(10, 10 + expected):
        assert not sent.future.done()
        advance(scheduler, scheduler.running, [token], "eager")
    completion = sent.future.result(0)
    assert (completion.tokens, completion.finish_reason) == (tuple(range(10, 10 + expected)), "length")
    assert scheduler.running == []


def test_the_end_token_at_the_last_place_is_a_stop(scheduler: Scheduler) -> None:
    sent = request(max_new_tokens=2)
    scheduler.submit(sent)
    scheduler.admit()
    advance(scheduler, scheduler.running, [5], "eager")
    advance(scheduler, scheduler.running, [EOS], "eager")
    completion = sent.future.result(0)
    assert (completion.tokens, completion.finish_reason) == ((5,), "stop")


def test_a_prompt_is_not_part_of_the_tokens_even_with_the_end_token_in_it(scheduler: Scheduler) -> None:
    sent = request(prompt=(8, EOS, 9), max_new_tokens=2)
    scheduler.submit(sent)
    scheduler.admit()
    for token in (8, EOS, 9, 11, 12):
        assert not sent.future.done()
        advance(scheduler, scheduler.running, [token], "eager")
    assert sent.future.result(0).tokens == (11, 12)


def test_tokens_are_handed_out_as_they_come_without_prompt_and_end(scheduler: Scheduler) -> None:
    taken: list[tuple[int, bool]] = []
    sent = request(prompt=(8, 9))
    streamed = replace(sent, on_token=lambda token: taken.append((token, sent.future.done())))
    submit(scheduler, streamed, request("silent"))
    scheduler.admit()
    scheduler.admit()
    for tokens in ([8, 20], [9, 21], [11, 22]):
        advance(scheduler, scheduler.running, tokens, "eager")
    assert taken == [(11, False)]
    for tokens in ([12, 23], [EOS, EOS]):
        advance(scheduler, scheduler.running, tokens, "eager")
    assert taken == [(11, False), (12, False)]
    assert sent.future.result(0).tokens == (11, 12)


@pytest.mark.parametrize(("prompt", "read"), [((), 0), ((5,), 1), ((5, 6, 7), 3), ((5, 6, 7, 8, 9), 3)])
def test_what_of_a_prompt_is_read_with_the_image_takes_no_step(
    clock: Clock, prompt: tuple[int, ...], read: int
) -> None:
    scheduler = Scheduler(TABLE, Limits(20, 2, frozenset(), prompt_read=3), clock)
    sent, penalised = request("a", prompt), request("b", prompt, repetition_penalty=1.5)
    submit(scheduler, sent, penalised)
    rows = scheduler.admit() + scheduler.admit()
    assert [row.prefilled for row in rows] == [read, read]
    assert [row.total for row in scheduler.running] == [len(prompt) - read + 2] * 2
    steps = 0
    while not sent.future.done():
        advance(scheduler, scheduler.running, [11 + steps] * 2, "eager")
        steps += 1
    assert sent.future.result(0).tokens == (9 + steps, 10 + steps)
    assert steps == len(prompt) - read + 2


def test_the_last_token_is_handed_out_before_the_result(scheduler: Scheduler) -> None:
    sent = request(max_new_tokens=1)
    done: list[bool] = []
    scheduler.submit(replace(sent, on_token=lambda _: done.append(sent.future.done())))
    scheduler.admit()
    advance(scheduler, scheduler.running, [5], "eager")
    assert done == [False]
    assert sent.future.result(0).finish_reason == "length"


def test_a_model_without_an_end_token_runs_to_the_length(clock: Clock) -> None:
    scheduler = Scheduler(TABLE, Limits(20, 3, frozenset()), clock)
    sent = request()
    scheduler.submit(sent)
    scheduler.admit()
    for _ in range(3):
        advance(scheduler, scheduler.running, [EOS], "eager")
    assert sent.future.result(0).finish_reason == "length"


def test_a_waiting_request_past_its_deadline_never_gets_a_slot(scheduler: Scheduler, clock: Clock) -> None:
    late, patient = request("late", deadline=clock.now + 1), request("patient")
    submit(scheduler, late, patient)
    clock.now += 1
    assert scheduler.drop_lost() == []
    assert isinstance(late.future.exception(0), DeadlineExceeded)
    assert [row.request.id for row in scheduler.admit()] == ["patient"]


def test_a_running_row_past_its_deadline_frees_its_slot(scheduler: Scheduler, clock: Clock) -> None:
    rows = [request(name, deadline=clock.now + (1 if name == "b" else 9)) for name in "abcd"]
    submit(scheduler, *rows)
    scheduler.admit()
    clock.now += 1
    assert scheduler.drop_lost() == [(3, 1)]
    assert names(scheduler) == ["a", "d", "c"]
    assert isinstance(rows[1].future.exception(0), DeadlineExceeded)
    assert not rows[3].future.done()


def test_cancelled_requests_are_dropped_waiting_and_running(scheduler: Scheduler) -> None:
    rows = [request(name) for name in "abcdef"]
    submit(scheduler, *rows)
    scheduler.admit()
    rows[0].future.cancel()
    rows[4].future.cancel()
    assert scheduler.drop_lost() == [(3, 0)]
    assert names(scheduler) == ["d", "b", "c"]
    assert [row.request.id for row in scheduler.admit()] == ["f"]
    with pytest.raises(CancelledError):
        rows[0].future.result(0)


def test_a_client_that_leaves_as_its_row_ends_disturbs_nobody(scheduler: Scheduler) -> None:
    leaving, staying = request("leaving"), request("staying")
    submit(scheduler, leaving, staying)
    scheduler.admit()
    scheduler.admit()
    leaving.future.cancel()
    advance(scheduler, scheduler.running, [EOS, EOS], "eager")
    assert staying.future.result(0).finish_reason == "stop"


@pytest.mark.parametrize(
    ("ending", "moves", "left"),
    [
        ((), [], "abcd"),
        ((3,), [], "abc"),
        ((0,), [(3, 0)], "dbc"),
        ((0, 1), [(2, 0), (3, 1)], "cd"),
        ((0, 3), [(2, 0)], "cb"),
        ((1, 2), [(3, 1)], "ad"),
        ((0, 1, 2, 3), [], ""),
    ],
    ids=str,
)
def test_the_last_rows_move_into_freed_slots(
    scheduler: Scheduler, ending: tuple[int, ...], moves: list[tuple[int, int]], left: str
) -> None:
    submit(scheduler, *(request(name) for name in "abcd"))
    scheduler.admit()
    assert (
        advance(scheduler, scheduler.running, [EOS if slot in ending else 5 for slot in range(4)], "eager") == moves
    )
    assert names(scheduler) == list(left)


def test_a_step_that_failed_fails_what_ran_and_keeps_what_waits(scheduler: Scheduler) -> None:
    rows = [request(name) for name in "abcdef"]
    submit(scheduler, *rows)
    scheduler.admit()
    scheduler.fail_running(EngineFailed())
    assert [isinstance(row.future.exception(0), EngineFailed) for row in rows[:4]] == [True] * 4
    assert not rows[4].future.done()
    assert (scheduler.running, scheduler.depth) == ([], 2)


def test_fail_all_ends_everything_and_takes_nothing_in(scheduler: Scheduler) -> None:
    rows = [request(name) for name in "abcdef"]
    submit(scheduler, *rows)
    scheduler.admit()
    rows[5].future.cancel()
    scheduler.fail_all()
    assert [type(row.future.exception(0)) for row in rows[:5]] == [NotReady] * 5
    assert (scheduler.running, scheduler.depth) == ([], 0)
    with pytest.raises(NotReady):
        scheduler.submit(request())


def test_a_closed_scheduler_refuses_new_requests_and_serves_those_it_has(scheduler: Scheduler) -> None:
    kept = request("kept")
    scheduler.submit(kept)
    scheduler.close()
    with pytest.raises(NotReady, match="draining"):
        scheduler.submit(request())
    scheduler.wait()  # returns at once
    scheduler.admit()
    advance(scheduler, scheduler.running, [EOS], "eager")
    assert kept.future.result(0).finish_reason == "stop"


def test_wake_ends_one_wait(scheduler: Scheduler) -> None:
    scheduler.wake()
    scheduler.wait()
    assert not scheduler._woken
