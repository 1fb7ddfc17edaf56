"""Forks parts of the server, before anything is imported and before there is a second thread."""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

from snapcap.models.dataclass import dataclass

_PR_SET_PDEATHSIG = 1


class ForkError(OSError):
    """One line that says why the server cannot have its processes."""


class Closable(Protocol):
    """A socket, or anything else that holds open files."""

    def close(self) -> None:
        """Close its files in this process."""


@dataclass(frozen=True)
class ChildProcess:
    """The child, as its parent has it. `end`: of the socket to it."""

    pid: int
    end: socket.socket


def fork_child(serve: Callable[[socket.socket], int], others: Iterable[Closable]) -> ChildProcess:
    """A copy of this process as it is now, at the other end of a new socket.

    `serve`: what the child does; the result is its exit status. `others`: what it must not hold open.

    Raises:
        ForkError: this system cannot fork.
    """
    if not hasattr(os, "fork"):
        raise ForkError(f"`snapcap serve` needs a system with fork(2), which {sys.platform} does not have")
    if threading.active_count() > 1:
        raise RuntimeError("a thread was started before the fork; its locks would be copied as they are")
    # Who started this process may have left it ignored; a child's end could then not be waited for.
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
        status = serve(theirs)
    except BaseException:
        with contextlib.suppress(Exception):  # a full disk, or nobody who reads
            traceback.print_exc()
    finally:  # never back to the caller, who is the other process
        try:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
        finally:
            os._exit(status)


def settle() -> None:
    """Collect garbage from now on, which `serve` has put off.

    What the imports made stays for good: later collections need not look at it, nor write to memory that forked
    processes share."""
    gc.freeze()
    gc.enable()


def how_it_ended(code: int) -> str:
    """The end of a sentence, from what `os.waitstatus_to_exitcode` says of a child."""
    if code >= 0:
        return f"with status {code}; the log may have the cause"
    name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else str(-code)
    return f"by signal {name}; where that is SIGKILL, memory may have run out, as the system's log would say"


def _outlive_signals_but_not(parent: int) -> None:
    """Signals to the process group are the parent's to answer: this process ends when its socket is closed. Should
    the parent be killed, the kernel ends this one."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # A function, and not SIG_IGN, which the processes that are started from here would inherit.
        signal.signal(each, lambda number, frame: None)
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415  in children only

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            os._exit(1)
