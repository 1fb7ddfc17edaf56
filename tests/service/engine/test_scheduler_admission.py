"""When images wait although slots are free: for a full bucket, and for others; only under load and not long."""

import random
import statistics
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.fakes.scheduling import Clock, advance

from snapcap.service.engine import scheduler as scheduling
from snapcap.service.engine.request import CaptionRequest, Limits
from snapcap.service.engine.scheduler import MOST_STEPS_HELD, Scheduler
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.slot_request import SamplingParams

EOS, WORD = 2, 5
LIMITS = Limits(cache_length=200, default_new_tokens=150, eos_ids=frozenset({EOS}))


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(BucketTable.of((1, 4, 8)), LIMITS)


def submit(scheduler: Scheduler, count: int, deadline: float = 1e9) -> None:
    pixels: Any = None
    for _ in range(count):
        scheduler.submit(CaptionRequest("r", pixels, (), SamplingParams(), deadline, Future()))


def step(scheduler: Scheduler, ending: int) -> int:
    """A decode step after which so many rows end; returns how many were admitted before it."""
    admitted = len(scheduler.admit())
    rows = scheduler.launched()
    advance(scheduler, rows, [EOS] * ending + [WORD] * (len(rows) - ending), "eager")
    return admitted


def test_under_load_free_slots_are_filled_by_the_bucket(scheduler: Scheduler) -> None:
    submit(scheduler, 20)
    assert [step(scheduler, ending=1) for _ in range(10)] == [8, 0, 0, 0, 4, 0, 0, 0, 4, 0]


def test_fewer_than_a_bucket_that_wait_are_admitted_at_once(scheduler: Scheduler) -> None:
    submit(scheduler, 11)
    assert [step(scheduler, ending=1) for _ in range(4)] == [8, 1, 1, 1]


@pytest.mark.parametrize("requests", range(1, 9))
def test_with_a_slot_for_everyone_nobody_waits(scheduler: Scheduler, requests: int) -> None:
    submit(scheduler, requests)
    for _ in range(30):
        while scheduler.depth:
            assert scheduler.admit()
        assert len(scheduler.running) == requests
        rows = scheduler.launched()
        advance(scheduler, rows, [EOS] + [WORD] * (len(rows) - 1), "eager")
        submit(scheduler, 1)


def test_a_slot_does_not_stay_empty_beside_rows_that_go_on(scheduler: Scheduler) -> None:
    submit(scheduler, 20)
    step(scheduler, ending=2)
    waited = [step(scheduler, ending=0) for _ in range(MOST_STEPS_HELD + 3)]
    assert waited == [0] * MOST_STEPS_HELD + [1, 1, 0]  # both slots, and the table's smallest bucket each


def test_a_slot_that_becomes_free_later_waits_anew(scheduler: Scheduler) -> None:
    submit(scheduler, 20)
    step(scheduler, ending=1)
    for _ in range(MOST_STEPS_HELD):
        assert step(scheduler, ending=0) == 0
    assert step(scheduler, ending=0) == 1
    assert step(scheduler, ending=1) == 0  # all are taken
    assert step(scheduler, ending=0) == 0  # and this one waits again


def test_an_empty_device_is_given_what_there_is_at_once() -> None:
    scheduler = Scheduler(BucketTable.of((4, 8)), LIMITS)
    submit(scheduler, 5)
    assert step(scheduler, ending=0) > 0


def test_one_bucket_holds_nobody_back() -> None:
    scheduler = Scheduler(BucketTable.of((8,)), LIMITS)
    submit(scheduler, 30)
    assert [step(scheduler, ending=1) for _ in range(4)] == [8, 1, 1, 1]


def batch_ended(scheduler: Scheduler, images: int, image_s: float) -> None:
    """Serves ``images`` captions that end together, after which nothing runs."""
    size = scheduler.encode_table.fit(images).size
    scheduler.gathering.encoded(size, size * image_s)
    submit(scheduler, images)
    scheduler.wait()  # for the wake-up that the requests gave
    while scheduler.depth:
        scheduler.admit()
    advance(scheduler, scheduler.launched(), [EOS] * images, "eager")


@pytest.mark.parametrize("images", [2, 3, 8])
def test_the_first_image_after_a_batch_waits_for_as_many_as_the_batch_had(
    scheduler: Scheduler, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "_LONGEST_GATHER_S", 600.0)
    batch_ended(scheduler, images, image_s=600.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(scheduler.wait)
        for _ in range(images):
            with pytest.raises(TimeoutError):
                waiting.result(0.02)
            submit(scheduler, 1)
        waiting.result(30)
    assert scheduler.depth == images


def test_images_wait_for_others_at_most_half_the_time_of_an_encode(scheduler: Scheduler) -> None:
    scheduler.gathering.encoded(1, 600.0)  # an encode that other work held up
    batch_ended(scheduler, 3, image_s=0.2)
    submit(scheduler, 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(scheduler.wait).result(30)
    assert step(scheduler, ending=1) == 1


def test_a_wait_for_others_ends_in_any_case(scheduler: Scheduler) -> None:
    batch_ended(scheduler, 3, image_s=600.0)
    submit(scheduler, 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(scheduler.wait).result(30)
    assert step(scheduler, ending=1) == 1


def test_a_bucket_that_becomes_ready_later_counts_for_the_images_that_wait_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduling, "_LONGEST_GATHER_S", 600.0)
    scheduler = Scheduler(BucketTable.of((1,)), LIMITS, cold=iter((4, 8)))
    scheduler.warmed(4)
    batch_ended(scheduler, 4, image_s=600.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(scheduler.wait)
        submit(scheduler, 3)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        submit(scheduler, 1)
        waiting.result(30)


@pytest.mark.parametrize(("images", "closed"), [(1, False), (3, True)])
def test_no_image_waits_for_others_after_a_lone_caption_or_at_the_end(
    scheduler: Scheduler, images: int, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "_LONGEST_GATHER_S", 600.0)
    batch_ended(scheduler, images, image_s=600.0)
    submit(scheduler, 1)
    if closed:
        scheduler.close()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(scheduler.wait).result(30)
    assert step(scheduler, ending=1) == 1


# Milliseconds of an encode and of a step by bucket: ViT-B/16 + GPT-2 and SmolVLM-256M on an H200.
VIT = {1: 0.494, 4: 0.655, 16: 1.551, 64: 5.674}, {1: 0.23, 4: 0.39, 16: 0.41, 64: 0.6, 256: 1.17}
SMOLVLM = {1: 2.03, 4: 3.37, 16: 9.3, 64: 34.5}, {1: 0.39, 4: 0.63, 16: 0.63, 64: 0.77, 256: 1.31}


def measured(times: Mapping[int, float], clock: Clock | None = None) -> Scheduler:
    table = BucketTable.of((1, 4, 16, 64, 256))
    made = Scheduler(table, LIMITS, clock or Clock(), steps_alone={256})
    for size, milliseconds in times.items():
        made.gathering.encoded(size, milliseconds / 1000)
    return made


@pytest.mark.parametrize(
    ("times", "images", "part"),
    [
        *((VIT[0], images, part) for images, part in ((1, 1), (2, 2), (4, 4), (5, 4), (9, 9), (20, 16), (300, 64))),
        # Two images take less time in the bucket of four than alone; with a slow bucket of four they do not.
        *(({1: 2.2, 4: 5.8}, images, part) for images, part in ((2, 1), (3, 3), (4, 4))),
        # Nothing is known of the bucket of 16: a third of padding is most.
        *(({1: 2.2, 4: 5.8}, images, part) for images, part in ((9, 4), (11, 11))),
    ],
)
def test_images_are_encoded_in_the_parts_that_take_the_least_time(
    times: Mapping[int, float], images: int, part: int
) -> None:
    made = measured(times)
    submit(made, images)
    assert len(made.admit()) == part


def test_a_bucket_whose_only_encode_was_held_up_is_used_again() -> None:
    gathering, table = measured({1: 10, 4: 5000}).gathering, BucketTable.of((1, 4))
    for _ in range(3000):
        part = gathering.first_part(4, table)
        gathering.encoded(part, {1: 0.01, 4: 0.02}[part])
    assert gathering.first_part(4, table) == 4


def test_while_rows_run_an_image_waits_for_others_as_long_as_these_would_save_the_rows() -> None:
    clock = Clock()
    made = measured(VIT[0], clock)
    submit(made, 64)
    assert step(made, ending=0) == 64
    submit(made, 1)
    assert made.admit() == [], "64 rows would wait 0.4 ms longer for it than for one of 64 images"
    clock.now += 6 * 0.000494
    assert len(made.admit()) == 1, "no image waits longer than six encodes"
    submit(made, 15)
    clock.now += 0.0001
    assert made.admit() == []
    submit(made, 1)
    clock.now += 0.0006
    assert len(made.admit()) == 16, "together they have waited as long as the rows would"


def test_an_image_waits_for_others_for_a_small_part_of_its_time_limit() -> None:
    clock = Clock()
    made = measured({1: 500, 64: 16_000}, clock)
    submit(made, 64)
    assert step(made, ending=0) == 64
    submit(made, 1, deadline=clock.now + 2)
    assert made.admit() == []
    clock.now += 0.25
    assert len(made.admit()) == 1


def test_no_image_waits_for_others_once_no_more_can_come() -> None:
    made = measured(VIT[0])
    submit(made, 64)
    assert step(made, ending=0) == 64
    submit(made, 1)
    assert made.admit() == []
    made.close()
    assert len(made.admit()) == 1


def test_a_request_that_is_queued_just_before_an_admission_has_not_waited_for_less_than_nothing() -> None:
    clock = Clock()
    made = Scheduler(BucketTable.of((1,)), LIMITS, clock)
    lock = made._changed

    class Late:
        """The lock of the scheduler, for which the device thread waits while a request is queued."""

        def __enter__(self) -> None:
            made._changed = lock
            clock.now += 1
            submit(made, 1)
            lock.__enter__()

        def __exit__(self, *_: object) -> None:
            lock.__exit__(None, None, None)

    made._changed = Late()  # type: ignore[assignment]
    (row,) = made.admit()
    assert row.admitted >= row.submitted


def test_images_do_not_wait_for_others_on_a_cpu_nor_without_rows() -> None:
    made = measured(VIT[0])
    for _ in range(3):
        submit(made, 1)
        assert len(made.admit(by_time=False)) == 1
    made = measured(VIT[0])
    submit(made, 1)
    assert len(made.admit()) == 1


def median_latency(times: tuple[Mapping[int, float], Mapping[int, float]], rate: float, known: bool) -> float:
    """Returns the median milliseconds of captions of 20 tokens, which are asked for at random moments, so many a
    second. ``known``: the times of encodes are measured as they are in a server."""
    encodes, steps = times
    clock, random_moments = Clock(), random.Random(3)
    made = measured({}, clock)
    began, latencies, due = clock.now, list[float](), clock.now
    while len(latencies) < 3000:
        while due <= clock.now:
            submit(made, 1)
            due += random_moments.expovariate(rate)
        admitted = made.admit()
        if admitted:
            size = made.encode_table.fit(len(admitted)).size
            clock.now += encodes[size] / 1000
            if known:
                made.gathering.encoded(size, encodes[size] / 1000)
        if not made.running:
            clock.now = max(clock.now, due)
            continue
        rows = made.launched()
        clock.now += steps[made.step_table.fit(len(rows)).size] / 1000
        ended = [row.steps == 20 for row in rows]
        latencies += [clock.now - row.submitted for row, end in zip(rows, ended, strict=True) if end]
        advance(made, rows, [EOS if end else WORD for end in ended], "aot")
    assert clock.now > began
    return statistics.median(latencies) * 1000


@pytest.mark.parametrize(("times", "rate"), [(VIT, 2200), (SMOLVLM, 600)], ids=["vit", "smolvlm"])
def test_under_middling_load_captions_come_sooner_with_measured_encodes(
    times: tuple[Mapping[int, float], Mapping[int, float]], rate: float
) -> None:
    assert median_latency(times, rate, known=True) < 0.75 * median_latency(times, rate, known=False)
