"""What the kernel tells of processes: whether any child was ever started, their names, and memory."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from snapcap.benchmarks.harness.processes import (
    WATCH_S,
    DeviceMemory,
    ProcessTable,
    Watch,
    children,
    cpu_seconds,
    descendants,
    is_compiler,
    kernel_counts_children,
    own_parts,
    peak_host_bytes,
)


@contextmanager
def child(script: str) -> Iterator["subprocess.Popen[str]"]:
    """A Python that has run the script and waits."""
    program = f"import subprocess, sys\n{script}\nprint('done', flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-S", "-c", program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        yield process
    finally:
        process.kill()
        process.communicate()


needs_accounting = pytest.mark.skipif(not kernel_counts_children(), reason="this kernel does not count children")


@needs_accounting
def test_a_process_that_started_nothing_is_known_to_have_started_nothing() -> None:
    with child("") as process:
        assert children(process.pid, counts=True).none


@needs_accounting
def test_a_child_that_has_ended_unseen_is_counted() -> None:
    with child("subprocess.run(['true'])") as process:
        found = children(process.pid, counts=True)
    assert (found.ended, found.alive, found.none) == (True, (), False)


@needs_accounting
def test_a_grandchild_that_has_ended_unseen_is_counted() -> None:
    with child("subprocess.run(['sh', '-c', 'true; true'])") as process:
        assert children(process.pid, counts=True).ended


def test_a_living_child_is_named_and_its_children_are() -> None:
    with child("p = subprocess.Popen(['sh', '-c', 'sleep 60; true'])\nimport time; time.sleep(0.3)") as process:
        found = descendants(process.pid)
        for pid, _ in found:
            os.kill(pid, 9)
    assert sorted(name for _, name in found) == ["sh", "sleep"]


def test_a_second_look_finds_what_lives_and_forgets_what_has_ended() -> None:
    table = ProcessTable()
    script = "import threading, time; threading.Thread(target=subprocess.run, args=(['sleep', '1'],)).start()"
    with child(f"{script}; time.sleep(0.2)") as process:
        looks = [table.descendants(process.pid) for _ in range(2)]
        assert [[name for _, name in look] for look in looks] == [["sleep"], ["sleep"]]
        time.sleep(1.5)
        assert table.descendants(process.pid) == []


def test_where_the_kernel_does_not_count_nothing_is_claimed() -> None:
    with child("") as process:
        found = children(process.pid, counts=False)
    assert (found.ended, found.none) == (None, False)


def test_the_watch_names_what_it_sees() -> None:
    with child("") as process, Watch(process.pid) as watch:
        time.sleep(3 * WATCH_S)
    assert watch.programs == []
    assert watch.interval >= WATCH_S
    with Watch(os.getpid()) as watch:
        subprocess.run(["sleep", "0.3"], check=True)
    assert "sleep" in watch.programs
    assert watch.compilers == []


@pytest.mark.parametrize(
    "program",
    [
        "gcc",
        "g++",
        "cc1plus",
        "ptxas",
        "nvcc",
        "ld",
        "as",
        "x86_64-linux-gnu-g++-12",
        "clang++-18",
        "ld.lld",
        "collect2",
    ],
)
def test_compilers_are_recognised(program: str) -> None:
    assert is_compiler(program)


@pytest.mark.parametrize(
    "program", ["python3", "sh", "python -m snapcap.warmup.artifacts.worker", "last", "cat", "nvidia-smi", "?"]
)
def test_other_programs_are_no_compilers(program: str) -> None:
    assert not is_compiler(program)


def test_the_peak_of_memory_does_not_fall() -> None:
    with child("x = bytearray(64 << 20); del x") as process:
        peak = peak_host_bytes(process.pid)
        assert peak is None or peak > 64 << 20
        assert cpu_seconds(process.pid) >= 0.0
    assert peak_host_bytes(process.pid) is None


def test_device_memory_is_the_drivers_figure_or_the_growth() -> None:
    before = DeviceMemory(1000, {})
    assert DeviceMemory(5000, {7: 3000, 9: 200}).held_by([7, 9, 10], before) == 3200
    assert DeviceMemory(5000, {8: 3000}).held_by([7], before) == 4000


FORK = """
import os
if os.fork() == 0:
    {}
    sys.stdin.read()
    os._exit(0)
import time; time.sleep(0.3)"""


@needs_accounting
def test_the_parts_of_a_server_are_none_of_its_children() -> None:
    decoding = "import os\nif os.fork() == 0:\n    os.fork() and os.fork()\n    sys.stdin.read()\n    os._exit(0)\n"
    for script, count in ((FORK.format("pass"), 1), (FORK.format("pass") + "\n" + decoding + "time.sleep(0.3)", 4)):
        with child(script) as process:
            parts = own_parts(process.pid)
            assert len(parts) == count
            assert {pid for pid, _ in descendants(process.pid)} == set(parts)
            assert children(process.pid, True, parts).none
            assert not children(process.pid, True).none


@needs_accounting
@pytest.mark.parametrize("command", ["['true']", "['sh', '-c', 'true; true']"])
def test_what_a_part_has_started_is_counted(command: str) -> None:
    with child(FORK.format(f"subprocess.run({command})")) as process:
        assert children(process.pid, True, own_parts(process.pid)).ended


def test_what_the_first_part_starts_is_named_and_its_fork_is() -> None:
    with child(FORK.format("subprocess.Popen(['sleep', '60']); os.fork()")) as process:
        found = children(process.pid, True, own_parts(process.pid))
        for pid, name in descendants(process.pid):
            if name == "sleep":
                os.kill(pid, 9)
    assert sorted(found.alive)[-1] == "sleep"
    assert len(found.alive) == 2


def test_a_child_with_another_program_is_no_part() -> None:
    with child("p = subprocess.Popen(['sleep', '1'])") as process:
        assert own_parts(process.pid) == []


def test_the_watch_names_what_a_part_starts_and_not_itself() -> None:
    script = FORK.format("time = __import__('time'); time.sleep(0.2); subprocess.run(['sleep', '3'])")
    with child(script) as process, Watch(process.pid) as watch:
        time.sleep(1.5)  # on a busy machine too
    assert watch.programs == ["sleep"]
