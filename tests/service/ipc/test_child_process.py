"""Forks as their parents see them."""

import platform

import pytest
from support.servers.server_process import python

PROGRAM = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from snapcap.service.ipc.fork import fork_child
child = fork_child(lambda end: 3, [])
print(os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))
"""


def test_a_child_is_waited_for_even_where_the_signal_of_its_end_is_ignored() -> None:
    """As whoever started the server may have left it."""
    run = python("-c", PROGRAM)
    assert (run.stdout, run.stderr) == ("3\n", "")


FAILS = """
import os, sys
from snapcap.service.ipc.fork import fork_child
def fail(end):
    raise RuntimeError("something to print")
before = os.getpid()
sys.stderr = {stderr}
child = fork_child(fail, [])
print(os.getpid() == before, os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("stderr", ["None", "open('/dev/full', 'w')"])
def test_a_child_that_cannot_print_why_it_fails_does_not_go_on_as_its_parent(stderr: str) -> None:
    said = python("-c", FAILS.format(stderr=stderr)).stdout.splitlines()
    assert [line for line in said if line.startswith(("True", "False"))] == ["True 1"]


DEAD = """
import os, signal, time
from snapcap.service.ipc.fork import ForkError
from snapcap.service.server.processes import fork_engine
from snapcap.service.config.settings import Settings
from snapcap.service.ipc.shared_pixels import SharedPixels
engine = fork_engine()
os.kill(engine.process.pid, signal.SIGKILL)
os.waitid(os.P_PID, engine.process.pid, os.WEXITED | os.WNOWAIT)
try:
    engine.hand_over(Settings(), SharedPixels(3), 0.0)
except ForkError as error:
    print(error)
"""


def test_an_engine_process_that_ends_before_it_is_handed_the_settings_is_told_by_its_signal() -> None:
    run = python("-c", DEAD)
    assert run.stdout.startswith("the engine process ended by signal SIGKILL; "), run.stderr


HELD = """
import os, socket, time
from contextlib import suppress
from snapcap.service.server.processes import fork_engine
listener = socket.create_server(("127.0.0.1", 0))
engine = fork_engine([listener])
held = f"socket:[{os.fstat(listener.fileno()).st_ino}]"
folder = f"/proc/{engine.process.pid}/fd"
def opened():
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # it imports meanwhile, which opens and closes files
            yield os.readlink(f"{folder}/{name}")
end = time.monotonic() + 20
while held in set(opened()) and time.monotonic() < end:
    time.sleep(0.01)  # it has only just been forked
print(time.monotonic() < end)
"""


def test_an_engine_process_that_is_forked_late_does_not_hold_the_port() -> None:
    run = python("-c", HELD)
    assert run.stdout == "True\n", run.stderr


HEAPS = """
import ctypes, os, threading
from snapcap.service.ipc.fork import fork_child
def serve(end):
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_size_t
    both, addresses = threading.Barrier(2), []
    def allocate():
        both.wait()
        addresses.append(library.malloc(100))
        both.wait()
    threads = [threading.Thread(target=allocate) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    heap = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0]
    first, last = (int(address, 16) for address in heap.split("-"))
    print([first <= address < last for address in addresses], flush=True)
    return 0
os.waitpid(fork_child(serve, []).pid, 0)
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="ANOTHER C LIBRARY: ITS HEAPS ARE NOT KNOWN HERE")
def test_the_threads_of_a_child_share_one_heap() -> None:
    assert python("-c", HEAPS).stdout == "[True, True]\n"
