"""Weights are prepared behind a server that had to convert them, and the next one takes them as they are."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers.server_process import ServerProcess, descendants, snapcap, wait_until

from snapcap.service.server.prepared_weights import start_preparing
from snapcap.warmup.options import StartOptions
from snapcap.warmup.weights import worker as weights_worker
from snapcap.warmup.weights.prepare import Prepared

PATIENCE = 60.0


def test_the_next_start_takes_them_as_they_are(tmp_path: Path, samples: dict[Path, str]) -> None:
    arguments = ("--backend", "eager", "--buckets", "1", "--cache-dir", str(tmp_path))
    found = []
    for more in ((), (), ("--no-prepared-weights",)):
        with ServerProcess(*arguments, *more) as server:
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
    options = ("--cache-dir", str(built_cache), "--buckets", "1,4")
    run = snapcap("build", *options, timeout=900)
    assert (run.returncode, "weights kept" in run.stderr) == (0, True), run.stderr
    assert "nothing to do" in run.stderr
    with ServerProcess(*options) as server:
        startup = server.wait_ready().startup()
    assert (startup["tier"], startup["weights"]["result"]) == ("aot", "hit")


def test_a_server_that_ends_meanwhile_leaves_no_process(tmp_path: Path) -> None:
    with ServerProcess("--backend", "eager", "--buckets", "1", "--cache-dir", str(tmp_path)) as server:
        server.wait_ready()

        def workers() -> list[int]:
            lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(server.process.pid)}
            return [pid for pid, line in lines.items() if line.exists() and b"weights.worker" in line.read_bytes()]

        wait_until(lambda: bool(workers()), PATIENCE)
        (pid,) = workers()
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        server.process.terminate()
        server.process.wait(PATIENCE)
        assert not Path(f"/proc/{pid}").exists()
    assert list((tmp_path / "store").rglob("*.safetensors")) == []


# --- without a server ---


class FakeWorker:
    """In the place of the process."""

    def __init__(self, *_: object) -> None:
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()


def begin(monkeypatch: pytest.MonkeyPatch, result: str, after_s: float = 0.0) -> tuple[Any, list[FakeWorker]]:
    made: list[FakeWorker] = []

    def make(*_: object) -> FakeWorker:
        made.append(FakeWorker())
        return made[-1]

    monkeypatch.setattr(weights_worker, "weights_worker", make)
    monkeypatch.setattr(weights_worker, "prepare_in_worker", lambda *_, **__: Prepared("skipped", "no room"))
    loaded: Any = SimpleNamespace(weights=result, checkpoint=SimpleNamespace(folder=Path()), plan=None)
    stop = start_preparing(StartOptions(), loaded, after_s)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and not after_s:
            thread.join(PATIENCE)
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


def test_what_is_not_prepared_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    begin(monkeypatch, "miss")
    (record,) = [record for record in caplog.records if record.name == "snapcap.weights"]
    assert (record.levelname, record.fields["reason"]) == ("WARNING", "no room")  # type: ignore[attr-defined]
