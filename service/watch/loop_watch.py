"""Watches the event loop of the HTTP process from the engine process, and ends a server whose loop stands still.

Not from a thread beside the loop: what holds it up may hold Python's lock as well, and a stopped process runs no
thread.
"""

import logging
import os
import signal
import threading
import time
from contextlib import suppress

from snapcap.service.watch.last_words import END, STACKS
from snapcap.service.watch.watchdog import Watchdog

# What a stuck process is sent, and seconds until the next: where it stands, its end, that it may go on if it was
# stopped, and the end of one that has no handler yet.
_LAST = ((STACKS, 1.0), (END, 0.0), (signal.SIGCONT, 2.0), (signal.SIGKILL, 0.0))
_logger = logging.getLogger("snapcap.server")


class LoopWatch:
    """A thread of this process; `heard` is called for each sign of life of the other one."""

    def __init__(self, timeout: float, parent: int) -> None:
        """`timeout`: seconds without a sign, 0 for no limit. `parent`: the HTTP process."""
        self._watchdog = Watchdog(timeout)
        self._parent = parent
        self._ended = threading.Event()
        self.heard = self._watchdog.went_on

    def start(self) -> None:
        if self._watchdog.timeout:
            threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._watchdog.tick_s):
            if self._watchdog.tick():
                self._end()
                return

    def _end(self) -> None:
        sentence = f"the event loop of the HTTP process has stood still for {self._watchdog.silent_s:.0f} s"
        _logger.error("failed", extra={"fields": {"error": sentence, "pid": self._parent}})
        for number, seconds in _LAST:
            if os.getppid() != self._parent:  # it has ended: its number may be another's by now
                return
            with suppress(OSError):
                os.kill(self._parent, number)
            time.sleep(seconds)
