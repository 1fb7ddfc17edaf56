"""The device thread when a step fails, the device breaks, the queue is full, or nobody waits. No torch."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from support.fakes.list_engine import PATIENCE, Served, result
from support.servers.server_process import wait_until

from snapcap.service.engine.engine import MAX_CONSECUTIVE_FAILURES, DeviceFailedError
from snapcap.service.engine.request import CaptionRequest
from snapcap.service.errors import DeadlineExceeded, EngineFailed, NotReady
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.slot_request import SamplingParams, SlotRequest


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
    errors = [each.future.exception(PATIENCE) for each in sent]
    # From the last failure on it is the device that is at fault: who asks another server may be served there.
    assert [type(error) for error in errors] == [EngineFailed] * 16 + [NotReady] * 24
    error = served.outcome.exception(PATIENCE)
    assert isinstance(error, DeviceFailedError)
    assert str(error) == "the device failed 3 times in a row, the last with: sticky"
    assert str(error.__cause__) == "sticky"
    assert served.runner.steps == []
    assert len(served.runner.encoded) == MAX_CONSECUTIVE_FAILURES
    with pytest.raises(NotReady):
        served.send(1)


def test_turns_with_nothing_to_do_are_no_success() -> None:
    """An engine that is asked how it is makes one every few seconds."""
    served = Served()

    def fail() -> None:
        raise RuntimeError("sticky")

    served.runner.before_step = fail
    for image in range(MAX_CONSECUTIVE_FAILURES):
        assert served.outcome.running() or not served.outcome.done()
        with pytest.raises(EngineFailed if image + 1 < MAX_CONSECUTIVE_FAILURES else NotReady):
            result(served.send(image))
        if image + 1 < MAX_CONSECUTIVE_FAILURES:
            served.engine.call(lambda: None).result(PATIENCE)
    assert isinstance(served.outcome.exception(PATIENCE), DeviceFailedError)


def test_a_device_that_is_lost_ends_the_engine_at_once() -> None:
    served = Served()

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")

    served.runner.before_step, served.runner.device.condition = fail, "lost"
    with pytest.raises(NotReady):
        result(served.send(1))
    sentence = "the device is lost: CUDA error: device-side assert triggered"
    assert str(served.outcome.exception(PATIENCE)) == sentence
    assert len(served.runner.encoded) == 1


def test_a_call_that_finds_the_device_lost_ends_the_engine_too() -> None:
    served = Served()
    served.runner.device.condition = "lost"

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert isinstance(served.engine.call(fail).exception(PATIENCE), RuntimeError)
    assert isinstance(served.outcome.exception(PATIENCE), DeviceFailedError)


def test_a_device_without_memory_fails_requests_and_serves_once_there_is_some(served: Served) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    served.runner.before_step, served.runner.device.condition = fail, "out_of_memory"
    for image in range(1, 4 * MAX_CONSECUTIVE_FAILURES):
        with pytest.raises(EngineFailed):
            result(served.send(image))
    served.runner.before_step = lambda: None
    assert result(served.send(7)).tokens[0] == 700


def test_a_pulse_counts_turns_and_those_that_did_something(served: Served) -> None:
    result(served.send(1, max_new_tokens=2))
    served.engine.call(lambda: None).result(PATIENCE)
    before = served.engine.pulse()
    wait_until(lambda: served.engine.pulse().turns > before.turns + 3)
    idle = served.engine.pulse()
    assert (idle.work, idle.doing) == (before.work, "")
    result(served.send(1, max_new_tokens=2))
    assert served.engine.pulse().work > idle.work


def test_a_pulse_names_what_takes_long_and_stands_still_meanwhile(served: Served) -> None:
    reached, release = threading.Event(), threading.Event()

    def work() -> None:
        reached.set()
        release.wait(PATIENCE)

    called = served.engine.call(work, "make bucket 8 ready")
    assert reached.wait(PATIENCE)
    first, second = served.engine.pulse(), served.engine.pulse()
    assert first == second
    assert first.doing == "make bucket 8 ready"
    release.set()
    called.result(PATIENCE)
    wait_until(lambda: served.engine.pulse().work > first.work)
    assert served.engine.pulse().doing == ""


def test_rows_that_run_have_a_step_between_two_calls(served: Served) -> None:
    steps: list[int] = []
    release = served.hold()
    sent = served.send(1, max_new_tokens=12)
    calls = [served.engine.call(lambda: steps.append(len(served.runner.steps))) for _ in range(4)]
    release.set()
    result(sent)
    for each in calls:
        each.result(PATIENCE)
    assert steps == sorted(set(steps)), "each after another step"


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


def test_an_image_that_fails_alone_fails_no_other_request(served: Served) -> None:
    """The others of its batch, those that run and those that wait get their tokens, with beams and without."""
    encode = served.runner.encode

    def fail(bucket: Bucket, images: list[int], first_slot: int, rows: Sequence[SlotRequest] = ()) -> None:
        if {3, 6} & {*images}:
            raise ValueError("this image")
        encode(bucket, images, first_slot, rows)

    served.runner.encode = fail  # type: ignore[method-assign]
    release = served.hold()
    sent = [served.send(image, num_beams=1 + (image in (2, 3))) for image in range(1, 11)]
    release.set()
    for each in sent:
        if each.id in ("3", "6"):
            assert isinstance(each.future.exception(PATIENCE), EngineFailed)
        else:
            assert result(each).tokens == tuple(100 * int(each.id) + place for place in range(5))
    assert served.thread.is_alive()


def test_images_that_all_fail_are_failures_of_the_device(served: Served) -> None:
    def fail() -> None:
        raise RuntimeError("sticky")

    served.runner.before_encode = fail
    release = served.hold()
    sent = [served.send(image) for image in range(1, 25)]
    release.set()
    errors = [each.future.exception(PATIENCE) for each in sent]
    assert [type(error) for error in errors] == [EngineFailed] * 16 + [NotReady] * 8
    assert isinstance(served.outcome.exception(PATIENCE), DeviceFailedError)


@pytest.mark.parametrize("which", ["on_token", "on_admitted"])
def test_a_callback_that_raises_fails_its_request_alone(served: Served, which: str) -> None:
    def fail(*_: int) -> None:
        raise RuntimeError("the reply")

    def no_token(_: int) -> None: ...

    release = served.hold()
    callbacks: dict[str, Any] = {"on_token": no_token, which: fail}
    pixels: Any = 2.0
    odd = CaptionRequest("2", pixels, (), SamplingParams(), 1e12, Future(), **callbacks)
    first = served.send(1)
    served.engine.submit(odd)
    last = served.send(3)
    release.set()
    assert isinstance(odd.future.exception(PATIENCE), EngineFailed)
    assert result(first).tokens == tuple(range(100, 105))
    assert result(last).tokens == tuple(range(300, 305))
    assert result(served.send(4)).tokens[0] == 400
