"""When a device is given up. No torch."""

import pytest
from support.fakes.scheduling import Clock

from snapcap.service.engine.engine import (
    MAX_CONSECUTIVE_FAILURES,
    OUT_OF_MEMORY_S,
    DeviceFailedError,
    DeviceFailures,
)
from snapcap.warmup.errors import one_line, unexpected

ERROR = RuntimeError("CUDA error: unspecified launch failure\nFor debugging consider …")


@pytest.fixture
def failures(clock: Clock) -> DeviceFailures:
    return DeviceFailures(clock)


def test_a_lost_device_is_given_up_at_once_and_in_a_sentence(failures: DeviceFailures) -> None:
    with pytest.raises(DeviceFailedError) as caught:
        failures.judge(ERROR, "lost")
    assert one_line(caught.value) == "the device is lost: CUDA error: unspecified launch failure"
    assert unexpected(caught.value) is None  # the trace is in the log already
    assert caught.value.__cause__ is ERROR


def test_one_that_answers_has_as_many_attempts_as_there_are(failures: DeviceFailures) -> None:
    for _ in range(MAX_CONSECUTIVE_FAILURES - 1):
        failures.judge(ERROR, "failed")
    with pytest.raises(DeviceFailedError, match="failed 3 times in a row, the last with: CUDA error: unspecified"):
        failures.judge(ERROR, "failed")


def test_a_turn_that_went_well_forgets_those_before(failures: DeviceFailures) -> None:
    for _ in range(5):
        for _ in range(MAX_CONSECUTIVE_FAILURES - 1):
            failures.judge(ERROR, "failed")
        failures.none()


def test_memory_may_come_back_within_a_minute(failures: DeviceFailures, clock: Clock) -> None:
    for _ in range(100):
        failures.judge(ERROR, "out_of_memory")
        clock.now += (OUT_OF_MEMORY_S - 1) / 100
    failures.none()
    failures.judge(ERROR, "out_of_memory")
    clock.now += OUT_OF_MEMORY_S - 1
    failures.judge(ERROR, "out_of_memory")
    clock.now += 1
    with pytest.raises(DeviceFailedError, match="out of memory for 60 s"):
        failures.judge(ERROR, "out_of_memory")


def test_another_failure_among_those_of_memory_counts(failures: DeviceFailures) -> None:
    failures.judge(ERROR, "out_of_memory")
    failures.judge(ERROR, "failed")
    with pytest.raises(DeviceFailedError, match="3 times in a row"):
        failures.judge(ERROR, "out_of_memory")


def test_an_error_without_words_is_named(failures: DeviceFailures) -> None:
    with pytest.raises(DeviceFailedError, match="lost: KeyError"):
        failures.judge(KeyError(), "lost")
