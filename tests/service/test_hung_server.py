"""A part of a real server hangs: the readiness says so, who waits is told to come again, and the server ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest
from support.servers import faulty_server as faults
from support.servers.faulty_server import FaultyServer
from support.servers.server_process import ServerProcess, clean_environment, wait_until

from snapcap.benchmarks.harness.processes import cpu_seconds, is_gone

PATIENCE = 60.0
NAMESPACE = ("--user", "--map-root-user", "--pid", "--fork")
AGE = "snapcap_engine_progress_age_seconds"
EAGER = ("--backend", "eager", "--buckets", "1,4")
WATCHED = ("--watchdog-timeout", "2")


@pytest.fixture
def sample(samples: dict[Path, str]) -> Path:
    return next(iter(samples))


@pytest.fixture
def server(compiled_options: tuple[str, ...], tmp_path: Path) -> Iterator[FaultyServer]:
    with FaultyServer(tmp_path, *compiled_options, *WATCHED, "--drain-delay", "1") as process:
        yield process


def sentence(server: ServerProcess) -> str:
    """Of the one line that says why the server failed."""
    (line,) = [line for line in server.log().splitlines() if " error   failed " in line]
    return line.partition("error=")[2].strip('"')


def readiness(server: ServerProcess) -> tuple[int, str]:
    status, body, _ = server.call("/readyz")
    return status, "" if body is None else body.get("error", "")


def test_a_stopped_engine_ends_the_server_before_a_request_suffers(server: FaultyServer) -> None:
    """The probes said 200 for as long as one liked."""
    server.wait_ready()
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    seen: list[tuple[int, str]] = []
    server.wait_for(lambda: seen.append(readiness(server)) or seen[-1][0] == 503, seconds=PATIENCE)
    assert seen[-1][1].startswith("the engine has made no progress for 2 s, while it had nothing to do")
    assert server.call("/livez")[0] in (200, 0)
    assert server.process.wait(PATIENCE) == 4
    assert "the engine has made no progress" in sentence(server)
    assert is_gone(engine)


def test_who_waits_for_a_stopped_engine_is_told_to_come_again(server: FaultyServer, sample: Path) -> None:
    server.wait_ready()
    os.kill(server.engine_pid, signal.SIGSTOP)
    data = sample.read_bytes()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.call, "/v1/caption", data, timeout=PATIENCE) for _ in range(4)]
        replies = [reply.result() for reply in waiting]
    assert [(status, body["code"], body["phase"]) for status, body, _ in replies] == [
        (503, "not_ready", "failed")
    ] * 4
    assert {headers["retry-after"] for _, _, headers in replies} == {"1"}
    assert server.process.wait(PATIENCE) == 4


@pytest.mark.parametrize("fault", [faults.HANG, faults.HANG_LOCKED])
def test_a_step_that_never_ends_ends_the_server_and_the_log_has_where_it_stands(
    server: FaultyServer, sample: Path, fault: str
) -> None:
    server.wait_ready()
    server.caption(sample)
    server.switch(fault)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.call, "/v1/caption", sample.read_bytes(), timeout=PATIENCE)
        ages: list[float] = []
        server.wait_for(lambda: ages.append(server.metrics()[AGE]) or ages[-1] > 1, seconds=PATIENCE)
        assert waiting.result()[0] == 503
    assert server.process.wait(PATIENCE) == 4
    assert sentence(server).startswith("the engine has made no progress for 2 s, while requests wait")
    assert "in decode_step" in server.log(), f"the stacks of its threads: {server.log()}"


def test_an_engine_that_works_or_idles_is_left_alone(server: FaultyServer, sample: Path) -> None:
    server.wait_ready()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        server.caption(sample)
    time.sleep(3)
    assert server.metrics()[AGE] < 2
    assert readiness(server) == (200, "")


def test_a_server_that_was_stopped_as_a_whole_goes_on(compiled_options: tuple[str, ...], sample: Path) -> None:
    """Ctrl-Z, a paused container or a sleeping machine stops a server so. Any of its processes may go on first."""
    with ExitStack() as exits:
        servers = [exits.enter_context(ServerProcess(*compiled_options, *WATCHED)) for _ in range(2)]
        pids = [(each.wait_ready().process.pid, each.engine_pid) for each in servers]
        for pid in chain(*pids):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)  # three times what may pass
        orders = (pids[0], reversed(pids[1]))
        for first_and_second in zip(*orders, strict=True):
            for pid in first_and_second:
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
        time.sleep(2.5)
        for each in servers:
            each.caption(sample)
            assert " error " not in each.log()


@pytest.mark.parametrize("fault", [faults.BLOCK, faults.BLOCK_LOCKED])
def test_an_event_loop_that_stands_still_ends_the_server(server: FaultyServer, fault: str) -> None:
    server.wait_ready()
    engine = server.engine_pid
    server.switch(fault)
    assert server.process.wait(PATIENCE) == signal.SIGUSR2
    assert "the event loop of the HTTP process has not run for 2 s" in sentence(server)
    assert "in on_tick" in server.log(), "the stacks of its threads"
    wait_until(lambda: is_gone(engine))


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which the kernel tells as a mask."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_stopped_http_process_is_ended(server: FaultyServer) -> None:
    server.wait_ready()
    wait_until(lambda: catches(server.process.pid, signal.SIGUSR2))  # a moment after READY
    server.process.send_signal(signal.SIGSTOP)
    assert server.process.wait(PATIENCE) == signal.SIGUSR2
    assert "has not run for" in sentence(server)


def test_0_turns_it_off_and_the_metric_still_tells(compiled_options: tuple[str, ...]) -> None:
    with ServerProcess(*compiled_options, "--watchdog-timeout", "0") as server:
        server.wait_ready()
        os.kill(server.engine_pid, signal.SIGSTOP)
        server.wait_for(lambda: server.metrics()[AGE] >= 6)
        assert readiness(server) == (200, "")
        os.kill(server.engine_pid, signal.SIGCONT)
        server.wait_for(lambda: server.metrics()[AGE] <= 2)


def test_a_start_that_hangs_ends_when_it_has_a_time_limit(tmp_path: Path) -> None:
    with ServerProcess(*EAGER, *WATCHED, "--cache-dir", str(tmp_path), "--start-timeout", "3") as server:
        server.wait_for(lambda: server.call("/livez")[0] == 200)
        os.kill(server.engine_pid, signal.SIGSTOP)
        assert server.process.wait(PATIENCE) == 3
        assert "the start has taken 3 s, and is in phase " in sentence(server)


def cpu_of(pid: int, seconds: float) -> float:
    """CPU seconds that a process uses within so many seconds."""
    before = cpu_seconds(pid)
    time.sleep(seconds)
    return cpu_seconds(pid) - before


def test_a_search_waits_for_its_bucket_while_others_are_served(tmp_path: Path, sample: Path) -> None:
    server = FaultyServer(tmp_path, *EAGER, "--cache-dir", str(tmp_path))
    server.switch(faults.COLD)
    with server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        search = pool.submit(server.call, "/v1/caption?num_beams=4", sample.read_bytes(), timeout=PATIENCE)
        server.wait_for(lambda: server.metrics()["snapcap_requests_in_flight"] == 1)
        server.wait_for(lambda: cpu_of(server.engine_pid, 2) < 0.5)  # for ever, if it spins
        for _ in range(3):
            server.caption(sample)
        assert not search.done()
        server.switch(faults.WARM)
        assert search.result()[0] == 200


def test_a_search_whose_bucket_fails_is_refused_with_a_sentence(tmp_path: Path, sample: Path) -> None:
    server = FaultyServer(tmp_path, *EAGER, "--cache-dir", str(tmp_path))
    server.switch(faults.COLD)
    server.switch(faults.COLD_FAILS)
    with server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        search = pool.submit(server.call, "/v1/caption?num_beams=4", sample.read_bytes(), timeout=PATIENCE)
        server.wait_for(lambda: server.metrics()["snapcap_requests_in_flight"] == 1)
        server.switch(faults.WARM)
        for status, body, headers in (search.result(), server.call("/v1/caption?num_beams=4", sample.read_bytes())):
            assert (status, body["code"], headers["retry-after"]) == (503, "not_ready", "1")
            assert "send num_beams of at most 1" in body["detail"]
        server.caption(sample)
        states = {bucket["size"]: bucket["state"] for bucket in server.startup()["buckets"]}
        assert states == {1: "eager", 4: "failed"}
        metrics = server.metrics()
        assert metrics["snapcap_warmup_buckets_completed"] < metrics["snapcap_warmup_buckets_expected"]
        assert "bucket cannot be made ready bucket=4" in server.log()


IN_A_CONTAINER = """
import os, signal, sys, time
from snapcap.service.watch import END, STACKS, end_on_signal, print_stacks_on_signal
print_stacks_on_signal()
end_on_signal()
if os.fork() == 0:
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    time.sleep(0.5)
    if os.getppid() != parent:
        os._exit(0)
    print("outlives SIGKILL", flush=True)
    from snapcap.service.watch import LoopWatch
    watch = LoopWatch(0.5, parent)
    watch._watch()
    os._exit(0)
from support.servers.faulty_server import keep_the_lock
keep_the_lock()
"""


def test_the_first_process_of_a_container_is_ended_by_its_child() -> None:
    """It is spared its children's SIGKILL."""
    if subprocess.run(["unshare", *NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("NO PROCESS NAMESPACES HERE: THE END OF A CONTAINER'S FIRST PROCESS IS NOT CHECKED")
    run = subprocess.run(
        ["unshare", *NAMESPACE, sys.executable, "-c", IN_A_CONTAINER],
        env=clean_environment(PYTHONPATH=str(faults.TESTS)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (run.returncode, run.stdout) == (signal.SIGUSR2, "outlives SIGKILL\n"), run.stderr
    assert "in keep_the_lock" in run.stderr
