"""Ends a command and all its child processes at the first Ctrl-C or SIGTERM. Finished work is kept."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36
_PASSES = 3  # number of passes over the processes, because one may start another before it is killed
_GRACE_S = 10.0  # seconds after the first signal in which the block is left
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupted(BaseException):
    """Raised in the main thread when a signal arrives. A BaseException, as KeyboardInterrupt is.

    ``status`` is the exit status of the process, as shells define it. ``kept`` names the work that is kept, if the
    code that was interrupted knows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number
        self.kept = ""

    def __str__(self) -> str:
        return f"interrupted; {self.kept + ', ' if self.kept else ''}run the command again to continue"


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises ``Interrupted`` in the block at the first signal, and kills all child processes when the block is
    left.

    The process ends at once at a second signal, `_GRACE_S` seconds after the first, or at the first while this
    thread imports torch. Only the main thread may use it."""
    if sys.platform == "linux":
        # A compiler's driver that is killed leaves the compiler behind, which this process then adopts.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    seen: list[int] = []

    def cut_short(number: int) -> None:
        _end_descendants()
        if sys.stderr.isatty():
            os.write(2, _SHOW_CURSOR)  # a progress bar hides it
        os._exit(128 + number)

    def handle(number: int, frame: FrameType | None) -> None:
        if seen:
            cut_short(seen[0])
        if _imports_torch(frame):  # torch's C++ would abort at an exception; and there is no work to keep yet
            os.write(2, f"snapcap: {Interrupted(number)}\n".encode())
            cut_short(number)
        seen.append(number)
        timer = threading.Timer(_GRACE_S, cut_short, (number,))
        timer.daemon = True
        timer.start()
        raise Interrupted(number)

    before = [signal.signal(number, handle) for number in _NUMBERS]
    try:
        yield
    finally:
        if seen:  # the process is about to end; the handlers stay, so that a second signal ends it at once
            _end_descendants()
        else:
            for number, handler in zip(_NUMBERS, before, strict=True):
                signal.signal(number, handler)


def _imports_torch(frame: FrameType | None) -> bool:
    """Returns whether the code of torch's module is running in this frame or below it."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False


def _end_descendants() -> None:
    """Kills every descendant of this process. Does nothing except on Linux."""
    for _ in range(_PASSES):
        for pid in list(_below(os.getpid())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> Iterator[int]:
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the process has ended
            for child in map(int, each.read_text().split()):
                yield child
                yield from _below(child)
