"""Places of the queue: how many there are, who gets them, and that each comes back once."""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from support.fakes.list_engine import PATIENCE
from support.fakes.scheduling import Clock

from snapcap.service.engine.admission import Admission, Permit
from snapcap.service.errors import TooManyImages
from snapcap.service.limits import QueueFull


@pytest.fixture
def admission(clock: Clock) -> Admission:
    return Admission(3, clock)


def placed(admission: Admission) -> Permit:
    """A request whose image is here."""
    permit = admission.admit()
    permit.take()
    return permit


def test_one_more_than_there_are_places_is_refused(admission: Admission) -> None:
    permits = [placed(admission) for _ in range(3)]
    with pytest.raises(QueueFull):
        admission.admit()
    permits[1].release()
    with placed(admission), pytest.raises(QueueFull):
        admission.admit()
    assert admission.taken == 2


def test_a_request_whose_image_is_on_its_way_has_no_place(admission: Admission) -> None:
    """And finds none where the queue is full by then."""
    coming = [admission.admit() for _ in range(10)]
    assert admission.taken == 0
    for permit in coming[:3]:
        permit.take()
    with pytest.raises(QueueFull), coming[3] as late:
        late.take()
    coming[0].release()
    coming[4].take()
    assert admission.taken == 3


@pytest.mark.parametrize("how", [Permit.release, Permit.admitted, lambda permit: permit.__exit__(None, None, None)])
def test_a_place_comes_back_once(admission: Admission, how) -> None:
    other = placed(admission)
    with placed(admission) as permit:
        for _ in range(3):
            how(permit)
            assert (permit.places, admission.taken) == (0, 1)
    other.release()
    assert admission.taken == 0


def test_a_place_for_each_image_or_for_none(admission: Admission) -> None:
    other = placed(admission)
    with admission.admit() as permit:
        with pytest.raises(QueueFull):
            permit.take(3)
        assert (permit.places, admission.taken) == (0, 1)
        permit.take(2)
        permit.admitted()
        assert (permit.places, admission.taken) == (1, 2)
    assert admission.taken == 1
    other.release()


def test_more_images_than_all_of_the_queue_are_no_matter_of_time(admission: Admission) -> None:
    with admission.admit() as permit:
        with pytest.raises(TooManyImages, match="4 images; send at most 3"):
            permit.take(4)
        permit.take(3)
    assert admission.taken == 0


def refused(admission: Admission) -> float:
    with pytest.raises(QueueFull) as refusal:
        admission.admit()
    return refusal.value.retry_after_s


def test_who_is_refused_is_told_when_the_queue_will_have_gone(admission: Admission, clock: Clock) -> None:
    for _ in range(3):
        placed(admission)
    assert refused(admission) == 1.0, "nobody knows yet"
    for _ in range(3):
        clock.now += 2.0
        admission.completed()
    assert refused(admission) == pytest.approx(6.0), "three that wait, and one goes in two seconds"


@pytest.mark.parametrize(("seconds", "expected"), [(0.001, 1.0), (25.0, 60.0), (1000.0, 1.0)])
def test_retry_after_is_between_a_second_and_a_minute_and_forgets_what_was_long_ago(
    admission: Admission, clock: Clock, seconds: float, expected: float
) -> None:
    for _ in range(3):
        placed(admission)
        clock.now += seconds
        admission.completed()
    assert refused(admission) == expected


def test_captions_that_end_on_another_thread_disturb_no_refusal() -> None:
    """As those of the engine in this process do."""
    admission, over = Admission(1), threading.Event()
    placed(admission)

    def completes() -> None:
        while not over.is_set():
            admission.completed()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=completes)
    thread.start()
    try:
        assert all(refused(admission) >= 1.0 for _ in range(20_000))
    finally:
        over.set()
        thread.join(PATIENCE)
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("seed", range(5))
def test_from_many_threads_no_place_is_lost_or_made(seed: int) -> None:
    """Requests of several images that are admitted to rows by one thread while they end on another."""
    admission, over = Admission(7), threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not over.wait(0.0001):
            seen.append(admission.taken)

    def requests(number: int) -> None:
        luck, served = random.Random(seed * 100 + number), 0
        with ThreadPoolExecutor(1) as device:
            while served < 100:
                with suppress(QueueFull), admission.admit() as permit:
                    images = luck.randint(1, 4)
                    permit.take(images)
                    rows = [device.submit(permit.admitted) for _ in range(luck.randint(0, images))]
                    if rows and luck.random() < 0.5:
                        rows[-1].result(PATIENCE)
                    served += 1

    with ThreadPoolExecutor(9) as pool:
        looking = pool.submit(look)
        list(pool.map(requests, range(8)))
        over.set()
        looking.result(PATIENCE)
    assert admission.taken == 0
    assert 0 <= min(seen) <= max(seen) <= 7
