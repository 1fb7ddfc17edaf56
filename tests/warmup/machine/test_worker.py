"""The one way to a worker process: it is started when asked, bounded in time, and ended with all it has started."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.servers.server_process import wait_until

from snapcap.benchmarks.harness.processes import is_gone
from snapcap.models.json_object import from_json, to_json
from snapcap.warmup.machine.worker import Worker, WorkerError, WorkerTimeoutError

ROOT = Path(__file__).parents[3]
PROGRAM = """#!{python}
import os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from dataclasses import dataclass
from snapcap.warmup.machine.worker import serve_tasks

@dataclass
class Job:
    folder: Path
    begin: str

def start(job):
    assert isinstance(job.folder, Path)
    if job.begin == "late":
        time.sleep(1000)
    if job.begin == "never":
        raise ValueError("cannot begin")

    def answer(task):
        print("noise, as compilers make it")
        if task["do"] == "die":
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        if task["do"] == "spawn":
            return {{"pid": subprocess.Popen(["sleep", "1000"]).pid}}
        if task["do"] == "hang":
            (job.folder / "hangs").touch()
            time.sleep(1000)
        if task["do"] == "fail":
            raise ValueError("cannot do it\\nat length")
        if task["do"] == "flood":
            return {{"much": "a" * 2_000_000}}
        return {{"pid": os.getpid()}} if task["do"] == "tell" else []
    return answer

sys.exit(serve_tasks(Job, start))
"""
TELL, DIE, SPAWN, HANG, FAIL, LIST, FLOOD = (
    {"do": what} for what in ("tell", "die", "spawn", "hang", "fail", "list", "flood")
)


@dataclass
class Job:
    folder: Path
    begin: str = "now"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """One for a program that runs in the place of a module of ours."""
    program = tmp_path / "python"
    program.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT)))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return Job(tmp_path)


def test_one_process_does_all_tasks_until_it_dies_and_then_another(job: Job) -> None:
    with Worker("some.module", job) as worker:
        assert worker.pid is None, "it is started when it is first asked"
        first = worker.ask(TELL, 60)["pid"]
        with pytest.raises(WorkerError, match=r"^cannot do it$"):
            worker.ask(FAIL, 60)
        assert worker.ask(TELL, 60)["pid"] == first
        with pytest.raises(WorkerError, match=r"^some\.module ended with status 7: last words$"):
            worker.ask(DIE, 60)
        assert worker.pid is None
        second = worker.ask(TELL, 60)["pid"]
        assert second != first
    assert is_gone(second)


def test_what_takes_too_long_is_ended_with_all_it_has_started(job: Job) -> None:
    with Worker("some.module", job) as worker:
        first, started = worker.ask(TELL, 60)["pid"], worker.ask(SPAWN, 60)["pid"]
        with pytest.raises(WorkerTimeoutError, match=r"took more than 0\.5 s and was ended"):
            worker.ask(HANG, 0.5)
        assert is_gone(first)
        wait_until(lambda: is_gone(started))  # its parent was waited for, it was not
        assert worker.ask(TELL, 60)["pid"] != first


def test_a_start_has_a_limit_too(job: Job) -> None:
    job.begin = "late"
    with Worker("some.module", job) as worker:
        with pytest.raises(WorkerTimeoutError):
            worker.ask(TELL, 0.5)
        assert worker.pid is None
        with pytest.raises(WorkerTimeoutError):
            worker.start(0.5)


def test_one_that_cannot_begin_says_why_and_is_gone(job: Job) -> None:
    job.begin = "never"
    with Worker("some.module", job) as worker:
        with pytest.raises(WorkerError, match="cannot begin"):
            worker.ask(TELL, 60)
        assert worker.pid is None


def test_one_that_is_stopped_by_another_thread_ends_and_starts_no_more(job: Job) -> None:
    worker = Worker("some.module", job)
    started = worker.ask(SPAWN, 60)["pid"]
    errors: list[WorkerError] = []

    def ask() -> None:
        try:
            worker.ask(HANG, 60)
        except WorkerError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until((job.folder / "hangs").exists, 60)
    worker.stop()
    thread.join(60)
    assert [str(error).partition(":")[0] for error in errors] == ["some.module ended with signal 9"]
    wait_until(lambda: is_gone(started), 60)
    with pytest.raises(WorkerError, match="was ended before it began"):
        worker.ask(TELL, 60)


def test_an_answer_that_is_none_ends_it(job: Job) -> None:
    with Worker("some.module", job) as worker:
        with pytest.raises(WorkerError, match="something else than a JSON object"):
            worker.ask(LIST, 60)
        assert worker.pid is None


def test_an_answer_without_end_ends_it_at_once(job: Job) -> None:
    with Worker("some.module", job) as worker:
        with pytest.raises(WorkerError, match="answered with more than 1000000 characters"):
            worker.ask(FLOOD, 3600)
        assert worker.pid is None


def test_one_that_died_while_it_had_nothing_to_do_is_replaced(job: Job) -> None:
    with Worker("some.module", job) as worker:
        first = worker.ask(TELL, 60)["pid"]
        os.kill(first, signal.SIGKILL)
        # Not when its first thread has ended, which is what /proc shows, but when all of them have.
        wait_until(lambda: os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None, 60)
        assert worker.ask(TELL, 60)["pid"] != first


def test_a_process_can_be_there_before_its_job(job: Job) -> None:
    with Worker("some.module", job) as worker:
        worker.launch()
        process = worker._process
        assert process is not None
        worker.launch()
        assert worker._process is process
        assert worker.ask(TELL, 60)["pid"] == process.pid
        assert worker.ask(TELL, 60)["pid"] == process.pid
        with pytest.raises(WorkerError):
            worker.ask(DIE, 60)
        assert worker.ask(TELL, 60)["pid"] != process.pid


def test_a_launched_process_that_died_is_replaced_and_one_that_waits_is_ended(job: Job) -> None:
    with Worker("some.module", job) as worker:
        worker.launch()
        first = worker._process
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None, 60)
        assert worker.ask(TELL, 60)["pid"] != first.pid
    waiting = Worker("some.module", job)
    waiting.launch()
    process = waiting._process
    assert process is not None
    waiting.stop()
    assert is_gone(process.pid)
    waiting.launch()
    assert waiting.pid is None


def test_a_worker_ends_with_its_parent(job: Job) -> None:
    """Its input is closed then."""
    worker = Worker("some.module", job)
    pid = worker.ask(TELL, 60)["pid"]
    process = worker._process
    assert process is not None
    assert process.stdin is not None
    assert os.getpgid(pid) == pid, "a group of its own, so that a key on the terminal is its parent's to answer"
    process.stdin.close()
    assert process.wait(60) != 0
    worker.stop()


def test_records_cross_as_json() -> None:
    @dataclass
    class Outer:
        inner: Job
        paths: tuple[Path, ...]
        sizes: tuple[int, ...]
        key: Path | None = None

    record = Outer(Job(Path("a")), (Path("b"),), (1, 2))
    assert from_json(Outer, to_json(record)) == record
