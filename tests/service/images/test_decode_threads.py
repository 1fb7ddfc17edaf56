"""How many threads decode images, and how many processes; what threads refuse."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.fakes.list_engine import PATIENCE

from snapcap.models.processing.transform import ImageTransform
from snapcap.service.errors import DeadlineExceeded
from snapcap.service.images import threads as thread_decoder
from snapcap.service.images.decoder import DecodedImage, EncodedImage, ImageResult, UnreadableImage
from snapcap.service.images.processes import fork as decode_fork
from snapcap.service.images.processes.fork import decode_processes
from snapcap.service.images.sample import picture
from snapcap.service.images.threads import ThreadImageDecoder, decode_threads


@pytest.mark.parametrize(("asked", "cpus", "threads"), [(0, 2, 2), (0, 8, 8), (0, 64, 8), (1, 64, 1), (24, 2, 24)])
def test_one_for_each_cpu_up_to_eight_unless_asked(
    asked: int, cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_decoder, "available_cpus", lambda: cpus)
    assert decode_threads(asked) == threads


@pytest.mark.parametrize(
    ("asked", "cpus", "processes"),
    [(None, 1, 1), (None, 2, 2), (None, 7, 4), (None, 8, 5), (None, 16, 10), (None, 64, 12), (1, 64, 1), (9, 2, 9)],
)
def test_processes_leave_three_of_eight_cpus_and_are_always_there(
    asked: int | None, cpus: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_fork, "available_cpus", lambda: cpus)
    assert decode_processes(asked) == processes


@pytest.mark.parametrize(
    ("room", "seconds"), [(None, PATIENCE), (1 << 30, PATIENCE), (1000, PATIENCE), (None, -1.0)]
)
def test_a_thread_refuses_what_takes_too_much_memory_and_what_is_late(room: int | None, seconds: float) -> None:
    done: Future[ImageResult] = Future()

    def take(outcome: ImageResult) -> bool:
        done.set_result(outcome)
        return True

    with ThreadPoolExecutor(1) as pool:
        decoder = ThreadImageDecoder(pool, ImageTransform((8, 8)), room)
        decoder.decode(EncodedImage(picture(), "1", time.monotonic() + seconds, lambda: False), take)
        outcome = done.result(PATIENCE)
    if seconds < 0:
        assert isinstance(outcome, DeadlineExceeded)
    elif room == 1000:
        assert isinstance(outcome, UnreadableImage)
        assert outcome.reason == "too_large"
        assert "MiB of memory to be decoded, over the limit of 1 MiB" in outcome.sentence
    else:
        assert isinstance(outcome, DecodedImage)
