"""What the kernel tells of processes: whether any child was ever started, their names, and memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.servers.server_process import wait_until

from snapcap.benchmarks.harness.processes import (
    children,
    cpu_seconds,
    descendants,
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
    with child("p = subprocess.Popen(['sh', '-c', 'sleep 60; true'])") as process:
        wait_until(lambda: sorted(name for _, name in descendants(process.pid)) == ["sh", "sleep"])
        for pid, _ in descendants(process.pid):
            os.kill(pid, 9)


def test_where_the_kernel_does_not_count_nothing_is_claimed() -> None:
    with child("") as process:
        found = children(process.pid, counts=False)
    assert (found.ended, found.none) == (None, False)


def test_the_peak_of_memory_does_not_fall() -> None:
    with child("x = bytearray(64 << 20); del x") as process:
        peak = peak_host_bytes(process.pid)
        assert peak is None or peak > 64 << 20
        assert cpu_seconds(process.pid) >= 0.0
    assert peak_host_bytes(process.pid) is None


FORK = """
import os
reads, writes = os.pipe()
if os.fork() == 0:
    {}
    os.write(writes, b".")
    sys.stdin.read()
    os._exit(0)
os.read(reads, 1)"""


@needs_accounting
def test_the_parts_of_a_server_are_none_of_its_children() -> None:
    decoding = "import os\nif os.fork() == 0:\n    os.fork() and os.fork()\n    sys.stdin.read()\n    os._exit(0)\n"
    for script, count in ((FORK.format("pass"), 1), (FORK.format("pass") + "\n" + decoding, 4)):
        with child(script) as process:
            wait_until(lambda process=process, count=count: len(own_parts(process.pid)) == count)
            parts = own_parts(process.pid)
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
