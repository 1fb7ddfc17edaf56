"""How many threads decode images, and how many processes; what threads refuse."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fakes.list_engine import PATIENCE

from snapcap.models.processing.transform import ImageTransform
from snapcap.service.errors import DeadlineExceeded, UnprocessableImage
from snapcap.service.images import decode
from snapcap.service.images.decode import EncodedImage, ThreadImageDecoder, decode_processes, decode_threads
from snapcap.service.images.parent import picture


@pytest.mark.parametrize(("asked", "cpus", "threads"), [(0, 2, 2), (0, 8, 8), (0, 64, 8), (1, 64, 1), (24, 2, 24)])
def test_one_for_each_cpu_up_to_eight_unless_asked(
    asked: int, cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "available_cpus", lambda: cpus)
    assert decode_threads(asked) == threads


@pytest.mark.parametrize(
    ("asked", "cpus", "processes"),
    [(None, 1, 1), (None, 2, 2), (None, 7, 4), (None, 8, 5), (None, 16, 10), (None, 64, 12), (1, 64, 1), (9, 2, 9)],
)
def test_processes_leave_three_of_eight_cpus_and_are_always_there(
    asked: int | None, cpus: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "available_cpus", lambda: cpus)
    assert decode_processes(asked) == processes


@pytest.mark.parametrize(
    ("room", "seconds"), [(None, PATIENCE), (1 << 30, PATIENCE), (1000, PATIENCE), (None, -1.0)]
)
def test_a_thread_refuses_what_takes_too_much_memory_and_what_is_late(room: int | None, seconds: float) -> None:
    with ThreadPoolExecutor(1) as pool:
        decoder = ThreadImageDecoder(pool, ImageTransform((8, 8)), room)
        encoded = EncodedImage(picture(), "1", time.monotonic() + seconds)
        if seconds < 0:
            with pytest.raises(DeadlineExceeded):
                asyncio.run(decoder.decode(encoded))
        elif room == 1000:
            with pytest.raises(UnprocessableImage) as refused:
                asyncio.run(decoder.decode(encoded))
            assert refused.value.reason == "too_large"
            assert "MiB of memory to be decoded, over the limit of 1 MiB" in refused.value.detail
        else:
            assert asyncio.run(decoder.decode(encoded)).pixels.shape == (8, 8, 3)
