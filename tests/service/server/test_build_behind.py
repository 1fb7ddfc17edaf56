"""When the build behind a start without artifacts begins, and what ends it."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from snapcap.service import readiness
from snapcap.service.server.engine_process import start_build
from snapcap.warmup.options import StartOptions, StoreOptions
from snapcap.warmup.start import background_build as background

PATIENCE = 30.0


class FakeBuild:
    """In the place of `BackgroundBuild`."""

    def __init__(self, *_: object) -> None:
        self.started, self.stopped = 0, 0
        MADE.append(self)

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1


MADE: list[FakeBuild] = []


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeBuild]]:
    monkeypatch.setattr(background, "BackgroundBuild", FakeBuild)
    monkeypatch.setattr(readiness, "AFTER_READY_S", 0.0)
    MADE.clear()
    yield MADE
    MADE.clear()


def begin(
    *,
    compiled: bool = False,
    status: Any = None,
    store: StoreOptions | None = None,
    found: str = "miss",
) -> Any:
    artifacts = SimpleNamespace(fetched=SimpleNamespace(result=found))
    loaded: Any = SimpleNamespace(compiled=compiled, artifacts=artifacts)
    options = StartOptions(store=store or StoreOptions())
    engine: Any = SimpleNamespace(call=print)
    return start_build(options, loaded, status, engine)


def test_a_build_begins_on_another_thread_and_is_ended(made: list[FakeBuild]) -> None:
    stop = begin()
    end = time.monotonic() + PATIENCE
    while not (made and made[0].started):
        assert time.monotonic() < end
        time.sleep(0.005)
    stop()
    assert [(build.started, build.stopped) for build in made] == [(1, 1)]


def test_a_server_that_ends_first_builds_nothing(made: list[FakeBuild], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "AFTER_READY_S", PATIENCE)
    stop = begin()
    assert not made  # whoever waited for READY comes first
    stop()
    _timers_are_over()  # at once
    assert not made


def test_one_that_ends_while_the_build_is_made_starts_none(
    made: list[FakeBuild], monkeypatch: pytest.MonkeyPatch
) -> None:
    making, stopped = threading.Event(), threading.Event()

    class SlowBuild(FakeBuild):
        def __init__(self, *_: object) -> None:
            making.set()
            stopped.wait(PATIENCE)
            super().__init__()

    monkeypatch.setattr(background, "BackgroundBuild", SlowBuild)
    stop = begin()
    assert making.wait(PATIENCE)
    stop()
    stopped.set()
    _timers_are_over()
    assert [build.started for build in made] == [0]


def test_what_is_compiled_is_not_built(made: list[FakeBuild]) -> None:
    begin(compiled=True)
    _timers_are_over()
    assert not made


@pytest.mark.parametrize(
    ("address", "found", "looks"), [("s3://a/b", "error", True), ("s3://a/b", "miss", False), ("", "error", False)]
)
def test_without_a_build_only_a_store_that_could_not_be_read_is_asked_again(
    made: list[FakeBuild], address: str, found: str, looks: bool
) -> None:
    begin(store=StoreOptions(address=address, build="off"), found=found)
    _timers_are_over()
    assert bool(made) is looks


def test_a_build_that_cannot_begin_is_in_the_status_and_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoBuild(FakeBuild):
        def __init__(self, *_: object) -> None:
            raise ImportError("no compiler's module")

    monkeypatch.setattr(background, "BackgroundBuild", NoBuild)
    seen: list[dict[str, str]] = []
    stop = begin(status=SimpleNamespace(building=lambda **progress: seen.append(progress)))
    _timers_are_over()
    stop()
    assert seen == [{"state": "failed", "error": "ImportError: no compiler's module"}]
    assert "eager goes on serving" in caplog.text


def _timers_are_over() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(PATIENCE)
