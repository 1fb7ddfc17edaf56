"""Facts about processes that the kernel tells: their children, the parts of a server, and memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from support.servers.server_process import wait_until

from snapcap.benchmarks.harness.processes import (
    cpu_seconds,
    descendants,
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


def test_a_living_child_is_found_and_its_children_are() -> None:
    with child("p = subprocess.Popen(['sh', '-c', 'sleep 60; true'])") as process:
        wait_until(lambda: len(descendants(process.pid)) == 2)
        for pid in descendants(process.pid):
            os.kill(pid, 9)


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
    os.write(writes, b".")
    sys.stdin.read()
    os._exit(0)
os.read(reads, 1)"""


def test_the_parts_of_a_server_are_none_of_its_children() -> None:
    decoding = "import os\nif os.fork() == 0:\n    os.fork() and os.fork()\n    sys.stdin.read()\n    os._exit(0)\n"
    for script, count in ((FORK, 1), (f"{FORK}\n{decoding}", 4)):
        with child(script) as process:
            wait_until(lambda process=process, count=count: len(own_parts(process.pid)) == count)
            parts = own_parts(process.pid)
            assert set(descendants(process.pid)) == set(parts)


def test_a_child_with_another_program_is_no_part() -> None:
    with child("p = subprocess.Popen(['sleep', '1'])") as process:
        assert own_parts(process.pid) == []
