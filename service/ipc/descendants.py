"""Ends all processes below this one, also those whose own parent has ended before."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PASSES = 3  # what is found may start another before it is ended


def adopt_orphans() -> None:
    """From now on, a process below this one whose parent ends becomes this one's: a compiler's driver that is ended
    leaves the compiler behind. Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
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
