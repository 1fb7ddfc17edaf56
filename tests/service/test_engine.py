"""The device thread over a runner of lists: failures, calls between steps, draining. No torch."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from service.engine import MAX_CONSECUTIVE_FAILURES, Engine
from service.errors import DeadlineExceeded, EngineFailed, NotReady, Overloaded
from service.request import CaptionRequest, Completion, SamplingParams
from service.scheduler import Limits, Scheduler
from warmup.buckets import Bucket, BucketTable
from warmup.row import Row

PATIENCE = 30.0
EOS = 2
LIMITS = Limits(cache_length=32, default_new_tokens=5, eos_ids=frozenset({EOS}))


class ListRunner:
    """Slots as lists. Request n generates 100 n, 100 n + 1, …; a padded slot generates what nobody may see."""

    def __init__(self, slots: int) -> None:
        self.images = [-1] * slots
        self.rows: list[Row] = [Row()] * slots
        self.counts = [0] * slots
        self.steps: list[tuple[int, bool]] = []
        self.encoded: list[tuple[int, int]] = []
        self.before_step: Callable[[], object] = lambda: None
        self.before_encode: Callable[[], object] = lambda: None

    def encode(self, bucket: Bucket, images: list[int], first_slot: int) -> None:
        self.before_encode()
        assert len(images) <= bucket.size
        self.encoded.append((bucket.size, len(images)))
        self.images[first_slot : first_slot + len(images)] = images

    def admit(self, slot: int, row: Row) -> None:
        self.rows[slot], self.counts[slot] = row, 0

    def decode_step(self, bucket: Bucket, sampling: bool) -> None:
        self.before_step()
        self.steps.append((bucket.size, sampling))
        for slot in range(bucket.size):
            self.counts[slot] += 1

    def tokens(self, rows: int) -> list[int]:
        return [self._token(slot) for slot in range(rows)]

    def move(self, source: int, target: int) -> None:
        for held in (self.images, self.rows, self.counts):
            held[target] = held[source]  # type: ignore[index]

    def _token(self, slot: int) -> int:
        place, prompt = self.counts[slot] - 1, self.rows[slot].prompt
        return prompt[place] if place < len(prompt) else 100 * self.images[slot] + place - len(prompt)


class Observer:
    def __init__(self) -> None:
        self.waited: list[float] = []
        self.encodes: list[tuple[int, int]] = []
        self.steps: list[tuple[int, int]] = []
        self.generated = 0

    def queue_waited(self, seconds: float) -> None:
        self.waited.append(seconds)

    def encoded(self, bucket: int, rows: int, seconds: float) -> None:
        self.encodes.append((bucket, rows))

    def decode_stepped(self, bucket: int, rows: int, seconds: float) -> None:
        self.steps.append((bucket, rows))

    def tokens_generated(self, count: int) -> None:
        self.generated += count


class Served:
    """An engine on a thread of its own. ``held`` keeps it between two steps while requests are sent."""

    def __init__(self, capacity: int = 64) -> None:
        table = BucketTable.of((1, 4, 8))
        self.runner = ListRunner(table.largest.size)
        self.observer = Observer()
        self.scheduler = Scheduler(table, LIMITS, capacity)
        self.engine = Engine(self.scheduler, self.observer)
        self.outcome: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        runner: Any = self.runner
        try:
            self.engine.run(runner, lambda size: f"b{size}")
            self.outcome.set_result(None)
        except BaseException as error:
            self.outcome.set_exception(error)

    def hold(self) -> threading.Event:
        """Stop the device thread between two steps until the event is set."""
        reached, release = threading.Event(), threading.Event()

        def wait() -> None:
            reached.set()
            release.wait(PATIENCE)

        self.engine.call(wait)
        assert reached.wait(PATIENCE)
        return release

    def send(
        self, image: int, prompt: tuple[int, ...] = (), deadline: float = 1e12, **params: Any
    ) -> CaptionRequest:
        pixels: Any = image
        sent = CaptionRequest(str(image), pixels, prompt, SamplingParams(**params), deadline, Future())
        self.engine.submit(sent)
        return sent


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.engine.stop()
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()


def result(sent: CaptionRequest) -> Completion:
    return sent.future.result(PATIENCE)


def test_a_request_gets_its_tokens_from_the_smallest_bucket(served: Served) -> None:
    completion = result(served.send(7, max_new_tokens=3))
    assert (completion.tokens, completion.finish_reason, completion.backend) == ((700, 701, 702), "length", "b1")
    assert min(completion.queue_s, completion.encode_s, completion.decode_s) >= 0
    assert served.runner.steps == [(1, False)] * 3


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
    assert served.runner.steps == [(1, False), (1, False), (1, True), (1, True)]


def test_a_seed_gives_the_same_random_numbers_each_time_and_none_gives_others(served: Served) -> None:
    rows = []
    for seed in (3, 3, 4, None, None):
        result(served.send(1, temperature=0.7, top_k=9, top_p=0.5, seed=seed))
        rows.append(served.runner.rows[0])
    first = rows[0]
    assert (first.temperature, first.top_k, first.top_p, len(first.uniforms)) == (0.7, 9, 0.5, LIMITS.cache_length)
    assert all(0 <= number < 1 for number in first.uniforms)
    assert first.uniforms == rows[1].uniforms
    assert len({tuple(row.uniforms) for row in rows}) == 4


def test_a_failed_step_fails_only_what_ran_and_the_engine_serves_on(served: Served) -> None:
    release = served.hold()
    failures = iter([RuntimeError("device")])

    def fail_once() -> None:
        for error in failures:
            raise error

    served.runner.before_step = fail_once
    running, *waiting = [served.send(image) for image in range(1, 10)]
    release.set()
    with pytest.raises(EngineFailed):
        running.future.result(PATIENCE)
    assert result(waiting[-1]).tokens == tuple(range(900, 905))  # the ninth: no slot was free when it failed
    assert result(served.send(20)).tokens == tuple(range(2000, 2005))


def test_a_failed_encode_fails_its_requests_and_the_engine_serves_on(served: Served) -> None:
    failed = threading.Event()

    def fail() -> None:
        served.runner.before_encode = lambda: None
        failed.set()
        raise RuntimeError("device")

    served.runner.before_encode = fail
    with pytest.raises(EngineFailed):
        result(served.send(1))
    assert failed.is_set()
    assert result(served.send(2)).tokens[0] == 200


def test_failures_with_a_success_between_never_add_up(served: Served) -> None:
    def fail() -> None:
        raise RuntimeError("device")

    for image in range(1, 2 * MAX_CONSECUTIVE_FAILURES):
        served.runner.before_step = fail
        with pytest.raises(EngineFailed):
            result(served.send(image))
        served.runner.before_step = lambda: None
        assert result(served.send(image)).tokens[0] == 100 * image
    assert served.thread.is_alive()


def test_a_device_that_stays_broken_fails_all_and_ends_the_engine() -> None:
    served = Served()
    release = served.hold()

    def fail() -> None:
        raise RuntimeError("sticky")

    served.runner.before_step = fail
    sent = [served.send(image) for image in range(40)]  # more than fit the slots of as many failures
    release.set()
    for each in sent:
        with pytest.raises(EngineFailed):
            each.future.result(PATIENCE)
    error = served.outcome.exception(PATIENCE)
    assert isinstance(error, EngineFailed)
    assert str(error.__cause__) == "sticky"
    assert served.runner.steps == []
    assert len(served.runner.encoded) == MAX_CONSECUTIVE_FAILURES
    with pytest.raises(NotReady):
        served.send(1)


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


def test_a_full_queue_refuses_at_once() -> None:
    served = Served(capacity=2)
    release = served.hold()
    sent = [served.send(1), served.send(2)]
    with pytest.raises(Overloaded):
        served.send(3)
    release.set()
    assert [result(each).tokens[0] for each in sent] == [100, 200]
    served.engine.stop()
    served.outcome.result(PATIENCE)


def test_a_lost_request_costs_no_device_time(served: Served) -> None:
    release = served.hold()
    late, left, kept = served.send(1, deadline=0.0), served.send(2), served.send(3)
    left.future.cancel()
    release.set()
    assert result(kept).tokens[0] == 300
    with pytest.raises(DeadlineExceeded):
        result(late)
    assert served.observer.encodes == [(1, 1)]


def test_a_client_that_leaves_a_running_row_frees_its_slot(served: Served) -> None:
    reached, release = threading.Event(), threading.Event()

    def pause_second_step() -> None:
        if len(served.runner.steps) == 1:
            reached.set()
            release.wait(PATIENCE)

    served.runner.before_step = pause_second_step
    hold = served.hold()
    sent = [served.send(image) for image in (1, 2, 3, 4)]
    hold.set()
    assert reached.wait(PATIENCE)
    sent[0].future.cancel()
    release.set()
    for each in sent[1:]:
        assert result(each).tokens == tuple(100 * int(each.id) + place for place in range(5))
    assert served.observer.steps == [(4, 4)] * 2 + [(4, 3)] * 3
