"""Starts the other processes of a server.

The processes of a start are forked, before anything is imported and before a second thread exists. A process that
is needed later is spawned with an interpreter of its own: a fork would copy the locks of other threads as they are.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.own_imports import child_environment, python_module

_PR_SET_PDEATHSIG = 1
# malloc.h of glibc has these numbers.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


class ForkError(OSError):
    """Says in one line why the server cannot start its processes."""


class Closable(Protocol):
    """Protocol of sockets and other objects that hold open files."""

    def close(self) -> None:
        """Closes its files in this process."""


@dataclass(frozen=True)
class ChildProcess:
    """Holds a child's pid, and the parent's `end` of the socket to the child."""

    pid: int
    end: socket.socket


def fork_child(serve: Callable[[socket.socket], int], others: Iterable[Closable]) -> ChildProcess:
    """Forks this process. Returns the child, which runs `serve` with the other end of a new socket.

    `serve`: the child's work; it returns the exit status. `others`: open files that the child closes.

    Raises:
        ForkError: this system cannot fork.
        RuntimeError: a second thread runs.
    """
    if not hasattr(os, "fork"):
        raise ForkError(f"`snapcap serve` needs a system with fork(2), which {sys.platform} does not have")
    if threading.active_count() > 1:
        raise RuntimeError("a thread was started before the fork; its locks would be copied as they are")
    # The program that started this process may have ignored SIGCHLD; waitpid would then not return a child's
    # status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ours, theirs = socket.socketpair()
    parent, pid = os.getpid(), os.fork()
    if pid:
        theirs.close()
        return ChildProcess(pid, ours)
    status = 1
    try:
        for each in (ours, *others):
            each.close()
        _outlive_signals_but_not(parent)
        _share_one_heap()
        status = serve(theirs)
    except BaseException:
        with contextlib.suppress(Exception):  # a full disk, or a closed standard error
            traceback.print_exc()
    finally:  # the child must never return into the parent's code
        try:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
        finally:
            os._exit(status)


def spawn_child(module: str, *arguments: str) -> ChildProcess:
    """Starts `python -m module` beside a process that has threads, in which a fork is not safe.

    The module's first arguments are for `spawned_end`; `arguments` follow them.

    Raises:
        OSError: the system has no memory left, or too many processes or open files.
    """
    ours, theirs = socket.socketpair()
    try:
        theirs.set_inheritable(True)  # all other files of this process close with the exec
        command = [*python_module(module), str(theirs.fileno()), str(os.getpid()), *arguments]
        return ChildProcess(os.posix_spawn(command[0], command, child_environment()), ours)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


def spawned_end(arguments: Sequence[str]) -> socket.socket:
    """Returns the socket to the process that spawned this one. `arguments`: those of this process, from its
    first."""
    number, parent = arguments[:2]
    gc.disable()  # until `settle`, as in a process that is forked
    _outlive_signals_but_not(int(parent))
    _share_one_heap()
    return socket.socket(fileno=int(number))


def settle() -> None:
    """Enables garbage collection, which `serve` has put off.

    `gc.freeze` exempts the objects of the imports: collections skip them and do not write to memory that forked
    processes share.
    """
    gc.freeze()
    gc.enable()


def how_it_ended(code: int) -> str:
    """Returns the end of a sentence about a child's end. `code`: as `os.waitstatus_to_exitcode` returns it."""
    if code >= 0:
        return f"with status {code}; the log may have the cause"
    name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else str(-code)
    hint = "; if memory ran out, the system's log says so" if code == -signal.SIGKILL else ""
    return f"by signal {name}{hint}"


def _outlive_signals_but_not(parent: int) -> None:
    """Ignores signals to the process group, which the parent answers: the child ends when its socket is closed. If
    the parent is killed, the kernel kills the child."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # A function, because processes that are started from here would inherit SIG_IGN.
        signal.signal(each, lambda number, frame: None)
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415  only children need it

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the prctl call
            os._exit(1)


def trim_heap() -> None:
    """Gives the free memory of this process's heap back to the system. Other threads go on meanwhile."""
    import ctypes  # noqa: PLC0415  only a server whose models leave needs it

    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def return_large_memory(block: int) -> None:
    """Has this process give freed blocks of `block` bytes and more back to the system at once, and the free end of
    its heap when the end has twice as much. By default glibc raises the two limits to 32 and 64 MiB as large blocks
    are freed, and a process keeps most of what its largest bodies or pictures took."""
    _set_malloc({_M_MMAP_THRESHOLD: block, _M_TRIM_THRESHOLD: 2 * block})


def _share_one_heap() -> None:
    """Gives all threads of this process one heap. glibc would give each thread a heap of its own, and the memory
    that one thread frees could not be used by another: 5 MB more for the demo model's encodes and decode steps."""
    _set_malloc({_M_ARENA_MAX: 1})


def _set_malloc(values: Mapping[int, int]) -> None:
    import ctypes  # noqa: PLC0415  takes 10 ms, and the HTTP process needs it after its start only

    with contextlib.suppress(AttributeError):  # another C library than glibc
        library = ctypes.CDLL(None)
        for name, value in values.items():
            library.mallopt(name, value)
