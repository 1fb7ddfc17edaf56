"""Weights are prepared behind a server that had to convert them, and the next one takes them as they are."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers.server_process import ServerProcess, snapcap, wait_until

from snapcap.benchmarks.harness.processes import descendants
from snapcap.service import readiness
from snapcap.service.readiness import after_ready
from snapcap.service.server.engine_process import start_preparing
from snapcap.warmup.options import StartOptions
from snapcap.warmup.weights import prepare as weights_worker
from snapcap.warmup.weights.prepare import Prepared

PATIENCE = 60.0
SKIPPED = Prepared("skipped", "no room")


def test_the_next_start_takes_them_as_they_are(tmp_path: Path, samples: dict[Path, str]) -> None:
    arguments = ("--backend", "eager", "--buckets", "1", "--cache-dir", str(tmp_path))
    found = []
    for more in ("--prepared-weights", "--prepared-weights", "--no-prepared-weights"):
        with ServerProcess(*arguments, more) as server:
            startup = server.wait_ready().startup()
            image, caption = next(iter(samples.items()))
            assert server.caption(image)["caption"] == caption
            result = startup["weights"]["result"]
            found.append(result)
            assert server.metrics()[f'snapcap_startup_weights{{result="{result}"}}'] == 1
            if result == "miss":
                wait_until(lambda server=server: "weights for the next start" in server.log(), PATIENCE)
                assert "result=written" in server.log()
    assert found == ["miss", "hit", "off"]


def test_a_build_prepares_weights_too(built_cache: Path, tmp_path: Path) -> None:
    options = ("--cache-dir", str(built_cache), "--buckets", "1,4", "--prepared-weights")
    run = snapcap("build", *options, timeout=900)
    assert (run.returncode, "weights kept" in run.stderr) == (0, True), run.stderr
    assert "nothing to do" in run.stderr
    with ServerProcess(*options) as server:
        startup = server.wait_ready().startup()
    assert (startup["tier"], startup["weights"]["result"]) == ("aot", "hit")


def test_a_server_that_ends_meanwhile_leaves_no_process(tmp_path: Path) -> None:
    options = ("--backend", "eager", "--buckets", "1", "--cache-dir", str(tmp_path), "--prepared-weights")
    with ServerProcess(*options) as server:
        server.wait_ready()

        def workers() -> list[int]:
            lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(server.process.pid)}
            return [pid for pid, line in lines.items() if line.exists() and b"weights.prepare" in line.read_bytes()]

        wait_until(lambda: bool(workers()), PATIENCE)
        (pid,) = workers()
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19, PATIENCE)  # set when it has been started
        server.process.terminate()
        server.process.wait(PATIENCE)
        assert not Path(f"/proc/{pid}").exists()
    left = {path.name for path in (tmp_path / "store" / "weights").glob("*")}
    assert left <= {".lock", ".writing"}, "at most what the next one removes"


# --- without a server ---


class FakeWorker:
    """In the place of the process."""

    def __init__(self, *_: object) -> None:
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()


def begin(
    monkeypatch: pytest.MonkeyPatch, result: str, after_s: float = 0.0, came: Prepared = SKIPPED
) -> tuple[Any, list[FakeWorker]]:
    made: list[FakeWorker] = []

    def make(*_: object) -> FakeWorker:
        made.append(FakeWorker())
        return made[-1]

    monkeypatch.setattr(weights_worker, "weights_worker", make)
    monkeypatch.setattr(weights_worker, "prepare_in_worker", lambda *_, **__: came)
    loaded: Any = SimpleNamespace(weights=result, checkpoint=SimpleNamespace(folder=Path()), plan=None)
    timers: list[threading.Timer] = []

    def after(work: Callable[[], object]) -> threading.Timer:
        timers.append(after_ready(work))
        return timers[-1]

    monkeypatch.setattr(readiness, "AFTER_READY_S", after_s)
    monkeypatch.setattr(readiness, "after_ready", after)
    stop = start_preparing(StartOptions(), loaded)
    for timer in timers if not after_s else ():
        timer.join(PATIENCE)
        assert not timer.is_alive()
    return stop, made


@pytest.mark.parametrize(("result", "count"), [("miss", 1), ("corrupt", 1), ("hit", 0), ("off", 0)])
def test_only_what_is_missing_is_prepared(monkeypatch: pytest.MonkeyPatch, result: str, count: int) -> None:
    stop, made = begin(monkeypatch, result)
    stop()
    assert len(made) == count
    assert all(worker.stopped.is_set() for worker in made)


def test_a_server_that_ends_first_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, made = begin(monkeypatch, "miss", PATIENCE)
    stop()
    assert made == []


@pytest.mark.parametrize(("came", "level"), [(SKIPPED, "WARNING"), (Prepared("busy", "another process"), "INFO")])
def test_what_is_not_prepared_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, came: Prepared, level: str
) -> None:
    with caplog.at_level("INFO", "snapcap.weights"):
        begin(monkeypatch, "miss", came=came)
    (record,) = [record for record in caplog.records if record.name == "snapcap.weights"]
    assert (record.levelname, record.fields["reason"]) == (level, came.reason)  # type: ignore[attr-defined]


def test_a_folder_that_is_read_only_starts_no_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    with caplog.at_level("INFO", "snapcap.weights"):
        assert begin(monkeypatch, "miss")[1] == []
    (record,) = [record for record in caplog.records if record.name == "snapcap.weights"]
    assert (record.levelname, "read-only" in record.getMessage()) == ("INFO", True)
