"""Notices a start, a device thread or an event loop that makes no progress, and ends the server.

A watchdog counts ticks and not seconds of a clock. A process that was stopped together with the watched one
(Ctrl-Z, a paused container, a machine that sleeps) has missed one tick when it continues, not an hour, and setting
a clock cannot end a server. The start, the engine and the event loop have a watchdog each.

The HTTP process watches the device thread of the engine process:

    every tick      ── beat ──▶  the engine, which wakes its device thread
    take            ◀─ pulse ──  its turns, and its turns that had work to do

The engine process watches the event loop of the HTTP process. A thread of the HTTP process could not watch its
loop: code that blocks the loop may hold Python's lock as well, and a stopped process runs no thread.

A stuck process answers two signals without running Python code, which a call into native code may block for ever:
the first prints the stacks of all threads, the second ends the process. The HTTP process answers both, the engine
process only the first.
"""

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from snapcap.models.errors import UserError
from snapcap.service.engine.remote.messages import Pulse

_TICK_S = 2.0
_SHORTEST_TICK_S = 0.1
_TICKS = 8  # number of ticks in a short time limit


class StalledError(UserError):
    """A part of the server makes no progress. The message is one line that says for how long."""


class Watchdog:
    """Measures the time without progress. Its owner calls `tick` every `tick_s` seconds; any thread calls `went_on`
    when there was progress."""

    def __init__(self, timeout: float) -> None:
        """`timeout` is the longest time without progress, in seconds; 0 sets no limit."""
        self.timeout = timeout
        self.tick_s = min(_TICK_S, max(timeout / _TICKS, _SHORTEST_TICK_S)) if timeout else _TICK_S
        self._missed = 0

    @property
    def silent_s(self) -> float:
        """Seconds since the last progress, counted in ticks."""
        return self._missed * self.tick_s

    def went_on(self) -> None:
        self._missed = 0

    def tick(self, patience: float = 1.0) -> bool:
        """Counts a tick. Returns whether the time limit, times `patience`, is exceeded."""
        self._missed += 1
        return 0 < self.timeout * patience < self.silent_s


# The time limit is so many times longer while the device thread runs an operation that takes longer than a step: a
# bucket's first run, or opening packages and comparing their results.
LONG_WORK = 10.0


class EngineWatch(Watchdog):
    """Reports an engine without progress. `look` must be called every `tick_s` seconds once the engine serves."""

    def __init__(
        self,
        timeout: float,
        beat: Callable[[], object],
        waiting: Callable[[], bool],
        stalled: Callable[[StalledError], object],
    ) -> None:
        """`timeout` is the longest time without progress in seconds, 0 for no limit. `beat` asks the engine for a
        pulse, `waiting` returns whether the engine has requests, and `stalled` is called once, with the error."""
        super().__init__(timeout)
        self._beat = beat
        self._waiting = waiting
        self._stalled = stalled
        self._pulse = Pulse()
        self._over = False

    def take(self, pulse: Pulse) -> None:
        """Takes the engine's answer, from any thread."""
        went_on = pulse.work != self._pulse.work or (pulse.turns != self._pulse.turns and not self._waiting())
        self._pulse = pulse
        if went_on:
            self.went_on()

    def look(self) -> None:
        """Counts a tick. Reports the engine if its time is over, and asks it for a pulse otherwise."""
        if self._over:
            return
        if self.tick(LONG_WORK if self._pulse.doing else 1.0):
            self._over = True
            self._stalled(StalledError(self._sentence()))
        else:
            self._beat()

    def _sentence(self) -> str:
        if self._pulse.doing:
            what = f"while it was to {self._pulse.doing}"
        else:
            what = "while requests wait" if self._waiting() else "while it had nothing to do"
        return f"the engine has made no progress for {self.silent_s:.0f} s, {what}"


# Prints the stack of every thread to standard error; the process goes on.
STACKS = signal.SIGUSR1
# Ends the process at once. SIGKILL cannot be used for the first process of a container: from its children that
# process gets only signals that it has a handler for.
END = signal.SIGUSR2
_STDERR = 2


def print_stacks_on_signal() -> None:
    """Has this process print its stacks on `STACKS`, instead of ending."""
    faulthandler.register(STACKS, _STDERR, all_threads=True)


def end_on_signal() -> None:
    """Has this process exit on `END`, with the signal's number as its status. The handler is the C library's
    `_exit`, because a handler in Python would wait for the interpreter."""
    import ctypes  # noqa: PLC0415  takes 10 ms, so a start imports it late

    library = ctypes.CDLL(None)
    library.signal(int(END), ctypes.cast(library._exit, ctypes.c_void_p))


# The signals to a stuck process, each with the seconds to wait after it. The process prints its stacks, exits,
# continues in case it was stopped, and is killed in case it has no handler for `END` yet.
_LAST = ((STACKS, 1.0), (END, 0.0), (signal.SIGCONT, 2.0), (signal.SIGKILL, 0.0))
_LINE_S = 1.0  # seconds for the line about the end to be written
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
        said = {"extra": {"fields": {"error": sentence, "pid": self._parent}}}
        # On a thread: the loop may be stuck because nobody reads the log, to which this line would wait as well.
        line = threading.Thread(target=_logger.error, args=("failed",), kwargs=said, name="loop-log", daemon=True)
        line.start()
        line.join(_LINE_S)
        for number, seconds in _LAST:
            if os.getppid() != self._parent:  # the HTTP process has ended: its id may belong to another process
                return
            with suppress(OSError):
                os.kill(self._parent, number)
            time.sleep(seconds)
