"""The fork of the engine process, before anything is imported and before there is a second thread."""

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from service.config import Settings
from service.shared_pixels import SharedPixels
from warmup.timeline import Timeline

Serve: TypeAlias = Callable[[Settings, socket.socket, SharedPixels, float], int]
_PR_SET_PDEATHSIG = 1


class ForkError(OSError):
    """One line that says why there can be no engine process."""


@dataclass(frozen=True)
class ForkedEngine:
    """The child, as its parent has it. `end`: of the socket to it."""

    pid: int
    end: socket.socket
    pixels: SharedPixels


def _serve_engine(settings: Settings, end: socket.socket, pixels: SharedPixels, origin: float) -> int:
    from service.engine_process import serve_engine  # noqa: PLC0415  in the child only

    return serve_engine(settings, end, pixels, origin)


def fork_engine(
    settings: Settings, timeline: Timeline, listeners: Iterable[socket.socket], serve: Serve = _serve_engine
) -> ForkedEngine:
    """Start the engine process. A copy of this one as it is now: it begins to import torch at once, while this
    process imports what answers, and each has a lock of its own for its Python code.

    `listeners`: what the child must not hold open. `serve`: what it does; the result is its exit status.

    Raises:
        ForkError: this system cannot fork.
    """
    if not hasattr(os, "fork"):
        raise ForkError(f"`snapcap serve` needs a system with fork(2), which {sys.platform} does not have")
    if threading.active_count() > 1:
        raise RuntimeError("a thread was started before the fork; its locks would be copied as they are")
    pixels = SharedPixels(settings.queue.size)
    ours, theirs = socket.socketpair()
    parent, pid = os.getpid(), os.fork()
    if pid:
        theirs.close()
        return ForkedEngine(pid, ours, pixels)
    status = 1
    try:
        ours.close()
        for listener in listeners:
            listener.close()
        _outlive_signals_but_not(parent)
        status = serve(settings, theirs, pixels, timeline.origin)
    except BaseException:
        traceback.print_exc()
    finally:  # never back to the caller, who is the other process
        sys.stderr.flush()
        os._exit(status)


def _outlive_signals_but_not(parent: int) -> None:
    """Signals to the process group are the parent's to answer: this process ends when its socket is closed. Should
    the parent be killed, the kernel ends this one."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # A function, and not SIG_IGN, which the processes that are started from here would inherit.
        signal.signal(each, lambda number, frame: None)
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415  in this process only, which needs it for torch's libraries anyway

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            os._exit(1)
