"""The device thread over a runner of lists: batches, sampling, calls between steps, stopping. No torch."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import pytest
from support.fakes.list_engine import LIMITS, PATIENCE, Served, result

from snapcap.service.engine.request import CaptionRequest
from snapcap.service.errors import BeamsNotReady, DeadlineExceeded, EngineFailed, NotReady
from snapcap.warmup.runtime.slot_request import GREEDY, Needs, SamplingParams


def test_a_request_gets_its_tokens_from_the_smallest_bucket(served: Served) -> None:
    completion = result(served.send(7, max_new_tokens=3))
    assert (completion.tokens, completion.finish_reason, completion.backend) == ((700, 701, 702), "length", "b1")
    assert min(completion.queue_s, completion.encode_s, completion.decode_s) >= 0
    assert served.runner.steps == [(1, GREEDY)] * 3


def test_a_step_is_launched_before_the_last_is_read_where_the_device_runs_ahead(served: Served) -> None:
    result(served.send(7, max_new_tokens=3))
    ahead = ["launch", "launch", "read", "launch", "read", "read"]
    assert served.runner.order == (ahead if served.runner.device.runs_ahead else ["launch", "read"] * 3)


def test_a_result_is_handed_out_behind_the_launch_of_the_next_step(served: Served) -> None:
    """A device that runs ahead works on while clients get their results. Otherwise the host does the next step's
    work itself, and hands the results out first."""
    release = served.hold()
    short, long, *_ = [served.send(image, max_new_tokens=2 if image == 1 else 6) for image in (1, 2, 3, 4)]
    done: list[bool] = []
    served.runner.before_step = lambda: done.append(short.future.done())
    release.set()
    assert result(long).tokens == tuple(range(200, 206))
    ahead = [False] * 4 + [True] * 2
    assert done == (ahead if served.runner.device.runs_ahead else [False] * 2 + [True] * 4)


def test_a_result_is_handed_out_though_the_next_launch_fails(served: Served) -> None:
    release = served.hold()
    short, long, *_ = [served.send(image, max_new_tokens=2 if image == 1 else 6) for image in (1, 2, 3, 4)]
    launches = iter(range(1, 100))
    failing = 4 if served.runner.device.runs_ahead else 3  # the first one behind the end of the short caption

    def launch() -> None:
        if next(launches) == failing:
            raise RuntimeError("the launch fails")

    served.runner.before_step = launch
    release.set()
    assert result(short).tokens == (100, 101)
    with pytest.raises(EngineFailed):
        result(long)
    assert result(served.send(3, max_new_tokens=1)).tokens == (300,)


def test_requests_of_different_ages_run_together_and_get_their_own_tokens(served: Served) -> None:
    luck = random.Random(5)
    release = served.hold()
    sent = []
    for image in range(1, 31):
        prompt = tuple(luck.choices(range(50, 60), k=luck.choice((0, 1, 6))))
        sent.append(served.send(image, prompt, max_new_tokens=luck.randint(1, 12)))
    release.set()
    for each in sent:
        first, count = 100 * int(each.id), each.params.max_new_tokens
        assert count is not None
        assert result(each).tokens == tuple(range(first, first + count))
    assert max(rows for _, rows in served.observer.steps) == 8
    assert len(served.observer.waited) == 30
    assert sum(rows for _, rows in served.observer.encodes) == 30
    assert served.observer.generated == sum(each.params.max_new_tokens or 0 for each in sent)


def test_a_step_samples_only_when_a_running_row_does(served: Served) -> None:
    result(served.send(1, max_new_tokens=2))
    result(served.send(2, max_new_tokens=2, temperature=0.5, seed=1))
    assert served.runner.steps == [(1, GREEDY)] * 2 + [(1, Needs(sampling=True))] * 2


def test_a_search_gets_its_tokens_at_its_end_from_the_bucket_of_its_rows(served: Served) -> None:
    completion = result(served.send(7, (50, 51), max_new_tokens=3, num_beams=3))
    assert (completion.tokens, completion.finish_reason, completion.backend) == ((700, 701, 702), "length", "b4")
    assert served.runner.steps == [(4, Needs(beams=True))] * 5
    assert served.observer.encodes == [(1, 1)]  # the image once
    assert served.observer.generated == 3
    row = served.runner.rows[0]
    assert (row.params.num_beams, row.new_tokens) == (3, 3)


def test_the_options_of_a_search_and_of_penalties_reach_the_row(served: Served) -> None:
    options = {
        "length_penalty": 2.0,
        "early_stopping": "never",
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
    }
    result(served.send(1, max_new_tokens=2, num_beams=2, **options))
    row = served.runner.rows[0]
    assert (row.params.num_beams, row.new_tokens) == (2, 2)
    assert (row.params.length_penalty, row.params.early_stopping) == (2.0, "never")
    assert (row.params.repetition_penalty, row.params.no_repeat_ngram_size) == (1.2, 3)
    assert served.runner.steps == [(4, Needs(penalties=True, beams=True))] * 2
    served.runner.steps.clear()
    result(served.send(1, max_new_tokens=2, temperature=0.5, repetition_penalty=1.2))
    assert served.runner.steps == [(1, Needs(sampling=True, penalties=True))] * 2


def test_searches_of_all_sizes_run_beside_greedy_rows_and_each_gets_its_own_tokens(served: Served) -> None:
    luck = random.Random(6)
    release = served.hold()
    sent = [
        served.send(
            image,
            tuple(luck.choices(range(50, 60), k=luck.choice((0, 1, 6)))),
            max_new_tokens=luck.randint(1, 12),
            num_beams=luck.choice((1, 1, 2, 3, 4, 5, 8)),
        )
        for image in range(1, 41)
    ]
    release.set()
    for each in sent:
        first, count = 100 * int(each.id), each.params.max_new_tokens
        assert count is not None
        assert result(each).tokens == tuple(range(first, first + count))
    assert served.observer.generated == sum(each.params.max_new_tokens or 0 for each in sent)
    mixed = [needs.beams for _, needs in served.runner.steps]
    assert True in mixed


def test_a_seed_gives_the_same_random_numbers_each_time_and_none_gives_others(served: Served) -> None:
    rows = []
    for seed in (3, 3, 4, None, None):
        result(served.send(1, temperature=0.7, top_k=9, top_p=0.5, seed=seed))
        rows.append(served.runner.rows[0])
    first = rows[0]
    assert (first.params.temperature, first.params.top_k, first.params.top_p, len(first.uniforms)) == (
        0.7,
        9,
        0.5,
        LIMITS.cache_length,
    )
    assert all(0 <= number < 1 for number in first.uniforms)
    assert first.uniforms == rows[1].uniforms
    assert len({tuple(row.uniforms) for row in rows}) == 4


def test_a_call_runs_on_the_device_thread_between_two_steps(served: Served) -> None:
    threads: list[threading.Thread] = []
    reached, release = threading.Event(), threading.Event()

    def pause_second_step() -> None:
        if len(served.runner.steps) == 1:
            reached.set()
            release.wait(PATIENCE)

    served.runner.before_step = pause_second_step
    sent = served.send(1, max_new_tokens=4)
    assert reached.wait(PATIENCE)

    def during() -> int:
        threads.append(threading.current_thread())
        return len(served.runner.steps)

    called = served.engine.call(during)
    assert not called.done()
    release.set()
    assert called.result(PATIENCE) == 2  # after the step that ran, before the next
    assert threads == [served.thread]
    assert result(sent).tokens == (100, 101, 102, 103)


def test_a_call_wakes_an_idle_engine_and_hands_back_its_error(served: Served) -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        served.engine.call(fail).result(PATIENCE)
    assert served.engine.call(lambda: 5).result(PATIENCE) == 5


def test_stop_finishes_what_runs_and_what_waits_and_takes_nothing_in() -> None:
    served = Served()
    release = served.hold()
    sent = [served.send(image) for image in range(1, 21)]
    served.engine.stop()
    with pytest.raises(NotReady):
        served.send(99)
    release.set()
    assert [result(each).tokens[0] for each in sent] == [100 * image for image in range(1, 21)]
    served.outcome.result(PATIENCE)


def test_stop_ends_an_idle_engine() -> None:
    served = Served()
    served.engine.stop()
    served.outcome.result(PATIENCE)


def test_a_search_that_waits_for_a_bucket_lets_others_pass_and_spins_nothing() -> None:
    """The engine made 200,000 turns a second, and served nobody."""
    served = Served(cold=(4, 8))
    search = served.send(1, num_beams=4)
    assert [result(served.send(image)).tokens[0] for image in (2, 3)] == [200, 300]
    before = served.engine.pulse().turns
    time.sleep(0.3)
    assert served.engine.pulse().turns - before < 10
    served.engine.call(partial(served.scheduler.warmed, 4)).result(PATIENCE)
    assert result(search).tokens[0] == 100
    served.engine.stop()
    served.outcome.result(PATIENCE)


def test_stop_waits_for_who_waits_for_a_bucket() -> None:
    served = Served(cold=(4, 8))
    search, lost = served.send(1, num_beams=4), served.send(2, num_beams=8)
    served.engine.stop()
    served.engine.call(partial(served.scheduler.warmed, 4))
    served.engine.call(partial(served.scheduler.give_up, 8))
    assert result(search).tokens[0] == 100
    assert isinstance(lost.future.exception(PATIENCE), BeamsNotReady)
    served.outcome.result(PATIENCE)


class Beside:
    """An engine with a running request, and with one whose image is encoded beside its steps until `release`."""

    def __init__(self, deadline: float = 1e12) -> None:
        """``deadline`` is the second request's."""
        self.served = Served(encodes_beside=True)
        self.encoding, self.release = threading.Event(), threading.Event()
        self.before_step: Callable[[], object] = lambda: None  # before each step that is beside the encode
        stepping, go_on = threading.Event(), threading.Event()
        runner = self.served.runner

        def hold_step() -> None:
            stepping.set()
            assert go_on.wait(PATIENCE)
            if len(runner.steps) > 1:
                assert self.encoding.wait(PATIENCE)
                self.before_step()

        def hold_encode() -> None:
            self.encoding.set()
            assert self.release.wait(PATIENCE)

        runner.before_step = hold_step
        self.first = self.served.send(1, max_new_tokens=20)
        assert stepping.wait(PATIENCE)
        runner.before_encode = hold_encode
        self.second = self.served.send(2, max_new_tokens=20, deadline=deadline)
        self.go_on = go_on.set

    def end(self) -> None:
        self.release.set()
        self.served.engine.stop()
        self.served.outcome.result(PATIENCE)


def test_rows_end_while_an_image_is_encoded_beside_their_steps() -> None:
    beside = Beside()
    third = beside.served.send(3, max_new_tokens=3)
    beside.go_on()
    assert result(beside.first).tokens == tuple(range(100, 120))
    assert not beside.second.future.done()
    beside.release.set()
    assert result(beside.second).tokens == tuple(range(200, 220))
    assert result(third).tokens == (300, 301, 302)
    assert beside.served.observer.encodes == [(1, 1)] * 3
    beside.end()


def test_a_lone_request_has_all_cpus_and_others_share_them() -> None:
    beside = Beside()
    assert beside.served.runner.device.threads == [2]
    beside.go_on()
    result(beside.first)
    assert beside.served.runner.device.threads == [2, 1]
    beside.release.set()
    result(beside.second)
    assert beside.served.runner.device.threads == [2, 1, 2]
    beside.end()


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_request_that_is_lost_while_its_image_is_encoded_costs_no_step(how: str) -> None:
    beside = Beside(deadline=time.monotonic() + PATIENCE if how == "late" else 1e12)
    beside.go_on()
    assert beside.encoding.wait(PATIENCE)
    result(beside.first)
    if how == "late":
        beside.served.scheduler._clock = lambda: time.monotonic() + PATIENCE
    else:
        beside.second.future.cancel()
    steps = len(beside.served.runner.steps)
    beside.release.set()
    assert result(beside.served.send(3, max_new_tokens=2)).tokens == (300, 301)
    assert len(beside.served.runner.steps) == steps + 2
    if how == "late":
        assert isinstance(beside.second.future.exception(), DeadlineExceeded)
    beside.end()


def test_a_call_and_an_end_wait_for_the_encode_beside_steps() -> None:
    beside = Beside()
    beside.go_on()
    assert beside.encoding.wait(PATIENCE)
    called = beside.served.engine.call(lambda: len(beside.served.runner.encoded))
    beside.served.engine.stop()
    beside.release.set()
    assert called.result(PATIENCE) == 2
    assert result(beside.second).tokens == tuple(range(200, 220))
    beside.end()


def test_a_step_that_fails_beside_an_encode_fails_both_and_the_next_request_is_served() -> None:
    beside = Beside()

    def fail() -> None:
        beside.before_step = lambda: None
        beside.release.set()
        raise RuntimeError("this step")

    beside.before_step = fail
    beside.go_on()
    errors = [each.future.exception(PATIENCE) for each in (beside.first, beside.second)]
    assert [type(error) for error in errors] == [EngineFailed] * 2
    assert result(beside.served.send(3)).tokens == (300, 301, 302, 303, 304)
    beside.end()


def test_an_image_that_cannot_be_read_beside_steps_fails_its_request_alone() -> None:
    beside = Beside()
    beside.release.set()
    pixels = 0  # of another process
    odd = CaptionRequest("odd", pixels, (), SamplingParams(), 1e12, Future())
    beside.served.engine.submit(odd)
    beside.go_on()
    assert isinstance(odd.future.exception(PATIENCE), EngineFailed)
    assert result(beside.first).tokens == tuple(range(100, 120))
    assert result(beside.second).tokens == tuple(range(200, 220))
    beside.end()
