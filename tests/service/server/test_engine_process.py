"""The two processes of `snapcap serve`: what each has imported, and what becomes of one when the other ends."""

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.servers.server_process import ServerProcess, python, wait_until

from snapcap.benchmarks.harness.processes import is_gone
from snapcap.service.config.settings import Settings, WatchdogSettings
from snapcap.service.server import engine_process
from snapcap.service.server.processes import fork_processes
from snapcap.warmup.progress.timeline import Timeline

PATIENCE = 60.0


@pytest.fixture
def sample(samples: dict[Path, str]) -> Path:
    return next(iter(samples))


@pytest.fixture
def server(compiled_options: tuple[str, ...]) -> Iterator[ServerProcess]:
    """Nothing of it is left when the test is over, however it ends."""
    with ServerProcess(*compiled_options, "--decode-processes", "1") as process:
        yield process


@pytest.fixture
def eager(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that imports torch, and takes seconds to start."""
    options = ("--backend", "eager", "--cache-dir", str(tmp_path), "--buckets", "1", "--decode-processes", "1")
    with ServerProcess(*options) as process:
        yield process


def libraries(pid: int) -> set[str]:
    """Names of the native libraries that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if ".so" in line}


def threads(pid: int) -> set[str]:
    return set(os.listdir(f"/proc/{pid}/task"))


def test_only_the_engine_process_has_torch(eager: ServerProcess, sample: Path) -> None:
    eager.wait_ready()
    eager.caption(sample)
    http, engine = libraries(eager.process.pid), libraries(eager.engine_pid)
    assert {name for name in http if "torch" in name} == set()
    assert {name for name in engine if name.startswith("libtorch_python")} != set()
    # And what turns tokens into text is in the other one only, and bytes into pixels in neither.
    assert any("tokenizers." in name for name in http)
    assert not any("tokenizers." in name for name in engine)
    assert not any("_imaging." in name for name in http | engine)


@pytest.mark.parametrize(
    ("dtype", "prepared", "trims"), [("int8", False, True), ("int8", True, False), ("float32", False, False)]
)
def test_the_float32_weights_that_became_int8_go_back_to_the_system(
    dtype: str, prepared: bool, trims: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolVLM 256M kept 490 MiB of them in its heap for as long as it ran."""
    trimmed: list[None] = []
    monkeypatch.setattr(engine_process, "trim_heap", lambda: trimmed.append(None))
    for name in ("settle", "_usage", "start_build", "start_preparing"):
        monkeypatch.setattr(engine_process, name, Mock())
    settings = replace(Settings(), watchdog=WatchdogSettings(timeout=0.0))
    process = engine_process._EngineProcess(settings, Mock(), Mock(), Timeline(0.0), 0.0, None)
    process._ended.set()
    loaded = Mock(model=Mock(prepared=prepared), plan=Mock(dtype=dtype))
    process._ready(loaded, Mock())
    assert len(trimmed) == trims


def test_the_first_caption_starts_no_thread(server: ServerProcess, sample: Path) -> None:
    server.wait_ready()
    for _ in range(2):  # by the second there is a thread that writes the log
        assert server.call("/v1/caption", b"")[0] == 400
    before = threads(server.process.pid)
    server.caption(sample)
    assert threads(server.process.pid) <= before


def test_an_engine_process_that_is_killed_fails_what_waits_and_ends_the_server(
    server: ServerProcess, sample: Path
) -> None:
    server.wait_ready()
    engine, data = server.engine_pid, sample.read_bytes()
    os.kill(engine, signal.SIGSTOP)  # in the middle of whatever it does, so that there are requests under way
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.call, "/v1/caption", data, timeout=PATIENCE) for _ in range(4)]
        server.wait_for(lambda: server.metrics()["snapcap_requests_in_flight"] == 4)
        os.kill(engine, signal.SIGKILL)
        replies = [reply.result() for reply in waiting]
    # To be sent again, here once it is back or to another server.
    assert [(status, body["code"]) for status, body, _ in replies] == [(503, "not_ready")] * 4
    assert {headers["retry-after"] for _, _, headers in replies} == {"1"}
    assert server.process.wait(PATIENCE) == 4
    (line,) = [line for line in server.log().splitlines() if " error   failed " in line]
    assert "the engine process ended by signal SIGKILL" in line
    assert "UserError" not in server.log()  # it is a sentence, without a trace


def test_an_engine_process_that_ends_during_the_start_ends_the_server(eager: ServerProcess) -> None:
    eager.wait_for(lambda: eager.call("/livez")[0] == 200)
    os.kill(eager.engine_pid, signal.SIGKILL)
    assert eager.process.wait(PATIENCE) == 3
    assert "the engine process ended by signal SIGKILL" in eager.log()


def test_the_engine_process_ends_when_the_other_is_killed(server: ServerProcess) -> None:
    server.wait_ready()
    engine = server.engine_pid
    server.process.kill()
    server.process.wait()
    wait_until(lambda: is_gone(engine))


def test_a_stopped_engine_process_ends_when_the_other_is_killed(server: ServerProcess) -> None:
    """One that hangs does not see the end of its socket; the kernel ends it."""
    server.wait_ready()
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: is_gone(engine))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_both_processes_drains(server: ServerProcess, sample: Path, number: signal.Signals) -> None:
    """As Ctrl-C in a terminal, or a supervisor that signals a whole group."""
    server.wait_ready()
    engine = server.engine_pid
    os.kill(engine, number)
    server.caption(sample)  # the engine process goes on
    server.process.send_signal(number)
    assert server.process.wait(PATIENCE) == 0
    assert is_gone(engine)
    assert "stopped" in server.log().splitlines()[-1]


def test_an_engine_process_that_hangs_does_not_hold_the_exit(server: ServerProcess) -> None:
    server.wait_ready()
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    server.terminate()
    assert server.process.wait(PATIENCE) == 0
    assert is_gone(engine)


def test_clients_that_leave_free_their_slots(server: ServerProcess, sample: Path) -> None:
    server.wait_ready()
    data = sample.read_bytes()
    head = b"POST /v1/caption?max_new_tokens=40 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data)
    os.kill(server.engine_pid, signal.SIGSTOP)
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    for client in clients:
        client.sendall(head + data)
    server.wait_for(lambda: server.metrics()["snapcap_queue_depth"] == 4)
    for client in clients:
        client.close()
    server.wait_for(lambda: server.metrics()["snapcap_queue_depth"] == 0)
    os.kill(server.engine_pid, signal.SIGCONT)
    before = server.metrics()["snapcap_generated_tokens_total"]
    reply = server.caption(sample)
    # Those that left were taken out before they cost the device anything.
    assert server.metrics()["snapcap_generated_tokens_total"] - before <= reply["tokens"] + 2


def test_what_only_the_http_process_reads_can_fail_the_start(tmp_path: Path, demo_folder: Path) -> None:
    """The engine process would serve this model."""
    folder = tmp_path / "model"
    shutil.copytree(demo_folder, folder, ignore=shutil.ignore_patterns("*.py", "samples", "__pycache__"))
    (folder / "tokenizer.json").write_text("{")
    options = ("--backend", "eager", "--cache-dir", str(tmp_path), "--model", str(folder), "--buckets", "1")
    with ServerProcess(*options) as process:
        process.wait_for(lambda: process.call("/livez")[0] == 200)
        engine = process.engine_pid
        assert process.process.wait(PATIENCE) == 3
        (line,) = [line for line in process.log().splitlines() if " error " in line]
    assert "tokenizer.json" in line
    assert is_gone(engine)


def test_a_second_thread_forbids_the_fork() -> None:
    """Whatever lock it held at that moment would stay taken in the child."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="a thread was started before the fork"):
            fork_processes(Settings(), Timeline.since_exec(), [])
    finally:
        over.set()
        thread.join()


NO_ROOM = """
import os, sys
def refuse():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = refuse
from snapcap.service.cli.main import main
sys.exit(main(["serve", "--host", "127.0.0.1", "--port", "0"]))
"""


def test_a_machine_without_room_for_a_process_is_told_in_a_sentence() -> None:
    run = python("-c", NO_ROOM)
    sentence = "snapcap: the server's processes cannot be started: [Errno 11] Resource temporarily unavailable\n"
    assert (run.returncode, run.stderr.endswith(sentence)) == (1, True), run.stderr
    assert "Traceback" not in run.stderr
