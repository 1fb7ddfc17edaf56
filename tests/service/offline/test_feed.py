"""Images decoded ahead of an engine: in order, bounded, and no failure ends the rest."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes.list_engine import LIMITS, PATIENCE, Served

from snapcap.models.processing.image_formats import ImageError
from snapcap.service.captioning.model_defaults import Resolved
from snapcap.service.offline.feed import Asked, Feed, FeedResult
from snapcap.warmup.runtime.slot_request import SamplingParams

AHEAD = 6
ASKED = Asked(Resolved((), (), SamplingParams()), None)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Files whose content is the number that the list engine takes for an image."""
    for number in range(40):
        (tmp_path / f"{number:02}").write_text(str(number))
    return [str(path) for path in sorted(tmp_path.iterdir())]


def feed(served: Served, decode: Callable[[bytes], int] = int, threads: int = 2) -> Feed:
    def decoded(data: bytes) -> Any:
        return SimpleNamespace(pixels=float(decode(data)), size=(3, 2))

    return Feed(served.engine, decoded, ASKED, threads=threads, ahead=AHEAD)


def first_tokens(outcomes: list[FeedResult]) -> list[int]:
    return [outcome.completion.tokens[0] for outcome in outcomes if outcome.completion]


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_outcomes_are_in_order(served: Served, paths: list[str]) -> None:
    outcomes = list(feed(served).outcomes(paths))
    assert [outcome.path for outcome in outcomes] == paths
    assert first_tokens(outcomes) == [100 * number for number in range(40)]


def test_no_images() -> None:
    served = Served()
    assert list(feed(served).outcomes([])) == []
    served.engine.stop()


def test_a_slow_image_holds_up_none_after_it(served: Served, paths: list[str]) -> None:
    slow = threading.Event()
    decoded: list[int] = []

    def decode(data: bytes) -> int:
        if data == b"0":
            assert slow.wait(PATIENCE)
        decoded.append(int(data))
        return int(data)

    outcomes: list[FeedResult] = []
    reader = threading.Thread(target=lambda: outcomes.extend(feed(served, decode).outcomes(paths)))
    reader.start()
    wait_for(lambda: served.observer.generated == 39 * LIMITS.default_new_tokens)
    assert outcomes == []
    assert decoded == list(range(1, 40))
    slow.set()
    reader.join(PATIENCE)
    assert first_tokens(outcomes) == [100 * number for number in range(40)]


def test_no_more_images_are_held_than_was_said(served: Served, paths: list[str]) -> None:
    decoded: list[int] = []

    def decode(data: bytes) -> int:
        decoded.append(int(data))
        return int(data)

    release = served.hold()
    outcomes: list[FeedResult] = []
    reader = threading.Thread(target=lambda: outcomes.extend(feed(served, decode).outcomes(paths)))
    reader.start()
    wait_for(lambda: served.scheduler.depth == AHEAD)
    time.sleep(0.05)
    assert len(decoded) == AHEAD
    release.set()
    reader.join(PATIENCE)
    assert len(outcomes) == 40


def test_what_nobody_takes_holds_up_the_decoders_and_not_the_device(served: Served, paths: list[str]) -> None:
    decoded: list[int] = []

    def decode(data: bytes) -> int:
        decoded.append(int(data))
        return int(data)

    fed = feed(served, decode, threads=1)  # one: in order
    outcomes = fed.outcomes(paths)
    first = next(outcomes)
    wait_for(lambda: len(decoded) > AHEAD and not served.scheduler.depth and not served.scheduler.running)
    time.sleep(0.05)
    assert decoded == list(range(1 + AHEAD))
    assert first_tokens([first, *outcomes]) == [100 * number for number in range(40)]


def test_all_threads_decode_where_one_does_not_keep_up(served: Served, paths: list[str]) -> None:
    both = threading.Barrier(2)

    def decode(data: bytes) -> int:
        both.wait(PATIENCE)  # for an image that is decoded at the same time
        return int(data)

    outcomes = list(feed(served, decode).outcomes(paths))
    assert first_tokens(outcomes) == [100 * number for number in range(40)]


def test_what_cannot_be_read_has_a_reason(
    served: Served, paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def decode(data: bytes) -> int:
        if data == b"3":
            raise ImageError("truncated", "the data ends early")
        if data == b"4":
            raise RecursionError("a decoder's own mistake")
        return int(data)

    Path(paths[2]).unlink()
    outcomes = list(feed(served, decode).outcomes(paths))
    assert [outcome.path for outcome in outcomes] == paths
    assert {outcome.index: outcome.reason for outcome in outcomes if outcome.completion is None} == {
        2: "No such file or directory",
        3: "the data ends early",
        4: "RecursionError: a decoder's own mistake",
    }


def test_stop_ends_with_what_is_done(served: Served, paths: list[str]) -> None:
    fed = feed(served)
    outcomes: Iterator[FeedResult] = fed.outcomes(paths)
    got = [next(outcomes) for _ in range(5)]
    fed.stop()
    got += outcomes
    indices = [outcome.index for outcome in got]
    assert indices[:5] == list(range(5))
    assert indices == sorted(set(indices))
    wait_for(lambda: not served.scheduler.depth and not served.scheduler.running)


def test_an_engine_that_fails_for_good_ends_it(paths: list[str]) -> None:
    served = Served()

    def fail() -> None:
        raise RuntimeError("device lost")

    served.runner.before_step = fail
    outcomes = list(feed(served).outcomes(paths))
    assert len(outcomes) < len(paths)
    assert all(outcome.completion is None and outcome.reason for outcome in outcomes)
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()
