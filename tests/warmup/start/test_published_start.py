"""What a start does with a published model, and where it does not come: it never fails for that."""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapcap.warmup.artifacts.fetch import Fetched, NotFetchedError
from snapcap.warmup.checkpoints import source
from snapcap.warmup.checkpoints.local import CheckpointError
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.start import published, start
from snapcap.warmup.start.preparation import Callbacks, Preparation
from snapcap.warmup.start.start import wait_for_parts
from snapcap.warmup.weights.find import FoundWeights

PATIENCE = 60.0
REVISION = {"commit": "1"}


class Fetcher:
    """Finds a model's description, whose weights do not come; or nothing."""

    def __init__(self, folder: Path | None, result: Any = "corrupt") -> None:
        self._folder = folder
        self._result = result
        self.may_answer = threading.Event()
        self.closed = threading.Event()

    def describe(self) -> SimpleNamespace:
        self.may_answer.wait(PATIENCE)
        if self._folder is None:
            raise NotFetchedError(Fetched(self._result, "nothing there"))
        weights = SimpleNamespace(identity=REVISION)
        return SimpleNamespace(folder=self._folder, found=SimpleNamespace(weights=weights))

    def packages(self, *_: object) -> Fetched:
        return Fetched("miss", "there are no packages")

    def weights(self, *_: object) -> FoundWeights:
        return FoundWeights(self._result, "a wrong chunk", bytes_fetched=3)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def downloaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The revision of what is downloaded instead; the one that was published, until a test changes it."""
    revision = dict(REVISION)
    monkeypatch.setattr(source, "downloaded_identity", lambda *_: revision)
    return revision


@pytest.fixture
def options(tmp_path: Path) -> StartOptions:
    return StartOptions(ModelOptions("demo", tmp_path), ComputeOptions("cpu", buckets=(1,), threads=1))


def begun(options: StartOptions, fetcher: Any, status: StartupStatus, found: list[Checkpoint]) -> Preparation:
    pool = ThreadPoolExecutor(2)
    prepared = Preparation(options, Timeline.since_exec(), status, pool, fetcher, Callbacks(found.append))
    pool.shutdown(wait=False)
    return prepared


def test_weights_that_do_not_come_are_read_from_the_checkpoint(
    options: StartOptions, demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = tmp_path / "description"
    description.mkdir()
    for path in demo_folder.glob("*.json"):
        (description / path.name).write_bytes(path.read_bytes())
    resolved, may_resolve = [], threading.Event()

    def resolve(*_: object) -> Path:
        may_resolve.wait(PATIENCE)
        resolved.append(1)
        return demo_folder

    monkeypatch.setattr("snapcap.warmup.checkpoints.source.resolve_checkpoint", resolve)
    fetcher, status, seen = Fetcher(description), StartupStatus(), list[Checkpoint]()
    fetcher.may_answer.set()
    prepared = begun(options, fetcher, status, seen)
    _, weights = prepared.weights.result(PATIENCE)
    assert resolved == [], "torch is imported beside the download"
    assert str(wait_for_parts(prepared)).startswith("the start found ")
    may_resolve.set()
    checkpoint = prepared.checkpoint.result(PATIENCE)
    assert (checkpoint.folder, checkpoint.bring) == (demo_folder, None)
    assert [each.folder for each in seen] == [description], "who reads the tokenizer does not wait"
    assert (weights.result, weights.mapped) == ("corrupt", None)
    assert status.to_dict()["weights"] == {"result": "corrupt", "reason": "a wrong chunk", "bytes_fetched": 3}


@pytest.mark.parametrize("result", ["miss", "error", "untrusted"])
def test_a_model_that_is_not_published_is_brought_as_ever(
    result: str, options: StartOptions, demo_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher, status = Fetcher(None, result), StartupStatus()
    with caplog.at_level(logging.INFO, "snapcap.start"):
        prepared = begun(options, fetcher, status, [])
        assert not prepared.published.done()
        fetcher.may_answer.set()
        checkpoint, (_, weights) = prepared.checkpoint.result(PATIENCE), prepared.weights.result(PATIENCE)
    assert wait_for_parts(prepared) == "there are no prepared weights of this model"
    assert checkpoint.folder.samefile(demo_folder)
    assert (weights.result, weights.reason) == (result, "nothing there")
    assert status.state.weights is not None
    assert status.state.weights.result == result
    levels = {record.levelname for record in caplog.records if record.message == "prepared weights"}
    assert levels == {"INFO" if result == "miss" else "WARNING"}


def test_weights_that_cannot_be_used_bring_the_whole_checkpoint(
    options: StartOptions, demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found, mapped, and of other regions than the configuration: a start with torch, and no failure."""
    options = replace(options, compute=replace(options.compute, backend="eager"))
    description = tmp_path / "description"
    description.mkdir()
    for path in demo_folder.glob("*.json"):
        (description / path.name).write_bytes(path.read_bytes())
    brought: list[Path] = []

    def prepared(*given: Any) -> Preparation:
        found = Preparation(*given)
        checkpoint, weights = found.weights.result()

        def bring() -> Path:
            brought.append(demo_folder)
            return demo_folder

        described, odd = Future[Any](), Future[Any]()
        described.set_result(replace(checkpoint, folder=description, bring=bring))
        mapped: Any = SimpleNamespace(header=SimpleNamespace(regions={}))
        odd.set_result((described.result(), replace(weights, result="hit", mapped=mapped)))
        found.weights, found.checkpoint = odd, described
        return found

    monkeypatch.setattr(start, "Preparation", prepared)
    loaded = start.load(options, Timeline.since_exec(), StartupStatus())
    assert brought == [demo_folder]
    assert loaded.weights == "corrupt"
    assert (loaded.checkpoint.folder, loaded.checkpoint.bring) == (demo_folder, None)


def test_a_checkpoint_that_was_changed_meanwhile_is_never_run_with_the_older_ones_tokenizer(
    options: StartOptions, demo_folder: Path, downloaded: dict[str, str]
) -> None:
    downloaded["commit"] = "2"
    fetcher = Fetcher(demo_folder)
    fetcher.may_answer.set()
    prepared = begun(options, fetcher, StartupStatus(), [])
    with pytest.raises(CheckpointError, match="was changed while this server started; start it again"):
        prepared.checkpoint.result(PATIENCE)


def test_what_fetches_is_ended_when_all_has_come() -> None:
    fetcher, coming = Fetcher(None), Future[None]()
    published.close_behind(fetcher, [coming])  # type: ignore[arg-type]
    assert not fetcher.closed.wait(0.1)
    coming.set_result(None)
    assert fetcher.closed.wait(PATIENCE)
    published.close_behind(None, [])


def test_what_cannot_begin_to_fetch_fails_no_start(
    monkeypatch: pytest.MonkeyPatch, options: StartOptions, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(published, "may_be_published", lambda _: True)
    monkeypatch.setattr("snapcap.warmup.weights.published.ModelFetcher", broken)
    assert published.begin_fetcher(options) is None
    assert "not asked for weights" in caplog.text
