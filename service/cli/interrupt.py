"""Ends a command by its first Ctrl-C or SIGTERM, with all processes below it: what it has made stays."""

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
_PASSES = 3  # what is found may start another before it is ended
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupted(BaseException):
    """Raised where the main thread is when the signal comes. Not an Exception, as KeyboardInterrupt is none.

    ``status``: of the process, as a shell has it. ``kept``: what is done by then, if somebody on the way knows it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number
        self.kept = ""

    def __str__(self) -> str:
        return f"interrupted; {self.kept + ', ' if self.kept else ''}run again to go on"


@contextmanager
def interruptible(grace_s: float = 10.0) -> Iterator[None]:
    """Raise ``Interrupted`` in the block at the first signal, and end what this process has started when it leaves
    the block. A second signal, or ``grace_s`` seconds, end the process at once, and so does the first one while
    this thread imports torch. Main thread only."""
    _adopt_orphans()
    seen: list[int] = []

    def cut_short(number: int) -> None:
        _end_descendants()
        if sys.stderr.isatty():
            os.write(2, _SHOW_CURSOR)  # a progress bar hides it
        os._exit(128 + number)

    def handle(number: int, frame: FrameType | None) -> None:
        if seen:
            cut_short(seen[0])
        if _imports_torch(frame):  # whose C++ aborts when Python raises below it; and nothing is made by then
            os.write(2, f"snapcap: {Interrupted(number)}\n".encode())
            cut_short(number)
        seen.append(number)
        timer = threading.Timer(grace_s, cut_short, (number,))
        timer.daemon = True
        timer.start()
        raise Interrupted(number)

    before = [signal.signal(number, handle) for number in _NUMBERS]
    try:
        yield
    finally:
        if seen:  # the process is about to end, and a second signal means now
            _end_descendants()
        else:
            for number, handler in zip(_NUMBERS, before, strict=True):
                signal.signal(number, handler)


def _imports_torch(frame: FrameType | None) -> bool:
    """Whether the module's own code is being run by what runs in this frame."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False


def _adopt_orphans() -> None:
    """From now on, a process below this one whose parent ends becomes this one's: a compiler's driver that is ended
    leaves the compiler behind. Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_descendants() -> None:
    """SIGKILL for every process below this one. Linux; elsewhere nothing."""
    for _ in range(_PASSES):
        for pid in list(_below(os.getpid())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> Iterator[int]:
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, each.read_text().split()):
                yield child
                yield from _below(child)
