"""When a free slot is left empty for a while: only under load, and not for long."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.fakes.scheduling import advance

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


def submit(scheduler: Scheduler, count: int) -> None:
    pixels: Any = None
    for _ in range(count):
        scheduler.submit(CaptionRequest("r", pixels, (), SamplingParams(), 1e9, Future()))


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
    scheduler.gathering.encoded(images, images * image_s)
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
