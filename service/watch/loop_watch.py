"""Watches the event loop of the HTTP process from the engine process, and ends a server whose loop does not run.

A thread of the HTTP process could not watch its loop: code that blocks the loop may hold Python's lock as well, and
a stopped process runs no thread.
"""

import logging
import os
import signal
import threading
import time
from contextlib import suppress

from snapcap.service.watch.last_words import END, STACKS
from snapcap.service.watch.watchdog import Watchdog

# The signals to a stuck process, each with the seconds to wait after it. The process prints its stacks, exits,
# continues in case it was stopped, and is killed in case it has no handler for `END` yet.
_LAST = ((STACKS, 1.0), (END, 0.0), (signal.SIGCONT, 2.0), (signal.SIGKILL, 0.0))
_logger = logging.getLogger("snapcap.server")


class LoopWatch:
    """Watches the HTTP process in a thread. `heard` must be called for each `Beat` of its event loop."""

    def __init__(self, timeout: float, parent: int) -> None:
        """`timeout` is the longest time without a beat in seconds, 0 for no limit. `parent` is the HTTP process's
        id."""
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
        sentence = f"the event loop of the HTTP process has not run for {self._watchdog.silent_s:.0f} s"
        _logger.error("failed", extra={"fields": {"error": sentence, "pid": self._parent}})
        for number, seconds in _LAST:
            if os.getppid() != self._parent:  # the HTTP process has ended: its id may belong to another process
                return
            with suppress(OSError):
                os.kill(self._parent, number)
            time.sleep(seconds)
