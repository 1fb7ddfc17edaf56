"""Builds of processes with one cache folder, as the models of a server have: one at a time."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers.server_process import wait_until

from snapcap.warmup.artifacts.lease import Held, Lease
from snapcap.warmup.artifacts.publish import Published
from snapcap.warmup.artifacts.store import StoreDeniedError, StoreError
from snapcap.warmup.options import ModelOptions, StartOptions, StoreOptions
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.runtime.torch_model import LoadedModel
from snapcap.warmup.start import background_build
from snapcap.warmup.start.background_build import BackgroundBuild

PATIENCE = 30.0


class Build(BackgroundBuild):
    """Builds nothing, until `ending` is set."""

    def __init__(self, folder: Path, key: str) -> None:
        fetched = SimpleNamespace(result="miss", reason="")
        artifacts = SimpleNamespace(key=key * 64, hit=False, fetched=fetched)
        loaded: Any = SimpleNamespace(artifacts=artifacts, model=object.__new__(LoadedModel))
        options = StartOptions(model=ModelOptions(cache_dir=folder), store=StoreOptions())
        self.status = StartupStatus()
        super().__init__(loaded, options, self.status, lambda function: None)  # type: ignore[arg-type,return-value]
        self.began, self.ending = threading.Event(), threading.Event()

    @property
    def said(self) -> str | None:
        return (self.status.to_dict()["build"] or {}).get("state")

    def _look(self) -> Any:
        return self._artifacts

    def _build(self, publishing: bool) -> None:
        self.began.set()
        assert self.ending.wait(PATIENCE)


@pytest.fixture
def new_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Build]]:
    monkeypatch.setattr(background_build, "require_compiler", lambda: "g++")
    monkeypatch.setattr(background_build, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(background_build, "ENDING_S", PATIENCE)
    made: list[Build] = []

    def make(key: str) -> Build:
        made.append(Build(tmp_path / "cache", key))
        made[-1].start()
        return made[-1]

    yield make
    for build in made:
        build.ending.set()
        build.stop()


def test_builds_of_other_models_wait_for_their_turn(new_build: Callable[[str], Build]) -> None:
    first = new_build("a")
    assert first.began.wait(PATIENCE)
    second, third = new_build("b"), new_build("c")
    wait_until(lambda: second.said == third.said == "waiting")
    third.stop()  # a model that leaves does not wait on
    assert not second.began.is_set()
    assert not third.began.is_set()
    first.ending.set()
    assert second.began.wait(PATIENCE)


def test_a_build_that_fails_ends_its_turn(
    new_build: Callable[[str], Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(build: Build, publishing: bool) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(Build, "_build", fails)
        first = new_build("a")
        wait_until(lambda: first.said == "failed")
    assert new_build("b").began.wait(PATIENCE)


@pytest.mark.parametrize(
    ("local", "remote", "state"),
    [
        ("published", "published", "published"),
        ("exists", "exists", "published"),
        ("published", "error", "failed"),
        ("published", "denied", "failed"),
        ("error", None, "failed"),
    ],
)
def test_a_build_is_published_once_the_store_has_its_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Any, remote: Any, state: str
) -> None:
    monkeypatch.setattr(background_build, "publish_built", lambda *_, **__: [Published(local, "why")])
    monkeypatch.setattr(background_build, "publish_in_worker", lambda *_: Published(remote, "why"))
    build = Build(tmp_path, "a")
    build._artifacts.fetched.unusable = False  # type: ignore[misc]
    build._artifacts.factors = {}  # type: ignore[misc]
    build._publish(None, publishing=True)  # type: ignore[arg-type]
    told = build.status.to_dict()["build"]
    assert told["state"] == state
    assert ("why" in told.get("error", "")) == (state == "failed")
    assert build.status.counts("builds") == {(state,): 1}


class Remote:
    """A remote store, whose requests `acquire` below does not send."""

    is_remote = True


def test_a_store_that_fails_while_a_build_waits_is_asked_again(
    new_build: Callable[[str], Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [Held("another server", 0.0), StoreError("503 SlowDown"), StoreError("503 SlowDown")]

    def answer(*_: object) -> Held | Lease:
        outcome = answers.pop(0) if answers else Lease(None, "a", "us", 60.0, False, time.time)  # type: ignore[arg-type]
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    def make(build: Build) -> None:
        build._build_or_wait(Remote(), "a" * 64, publishing=True)  # type: ignore[arg-type]

    monkeypatch.setattr(background_build, "acquire", answer)
    monkeypatch.setattr(Build, "_make", make)
    build = new_build("a")
    assert build.began.wait(PATIENCE), build.status.to_dict()["build"]


def test_a_folder_that_cannot_be_written_is_named_and_no_store_that_does_not_exist(
    new_build: Callable[[str], Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise StoreDeniedError("/cache/.lock: Read-only file system; make it writable, or choose another folder")

    monkeypatch.setattr(background_build, "acquire", denied)
    build = new_build("a")
    wait_until(lambda: build.said in ("failed", "declined"))
    state: Any = build.status.to_dict()["build"]
    assert "make it writable" in str(state)
    assert "None" not in str(state.get("command", ""))
