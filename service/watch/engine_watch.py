"""Watches the device thread from outside: it must make progress while it has work, and answer while it has none.

    every tick      ── beat ──▶  the engine, which wakes its device thread
    take            ◀─ pulse ──  its turns, and its turns that had work to do

Without requests a turn is enough, which does not touch the device. With requests the device thread must do work: a
thread that only spins makes no progress.
"""

from collections.abc import Callable

from snapcap.service.engine.remote.messages import Pulse
from snapcap.service.watch.watchdog import StalledError, Watchdog

# The time limit is so many times longer while the device thread runs an operation that takes longer than a step: a
# bucket's first run, or opening packages and comparing their results.
LONG_WORK = 10.0


class EngineWatch:
    """Reports an engine without progress. `tick` must be called every `tick_s` seconds once the engine serves."""

    def __init__(
        self,
        timeout: float,
        beat: Callable[[], object],
        waiting: Callable[[], bool],
        stalled: Callable[[StalledError], object],
    ) -> None:
        """`timeout` is the longest time without progress in seconds, 0 for no limit. `beat` asks the engine for a
        pulse, `waiting` returns whether the engine has requests, and `stalled` is called once, with the error."""
        self._watchdog = Watchdog(timeout)
        self._beat = beat
        self._waiting = waiting
        self._stalled = stalled
        self._pulse = Pulse()
        self._over = False

    @property
    def tick_s(self) -> float:
        return self._watchdog.tick_s

    @property
    def silent_s(self) -> float:
        """Seconds without progress of the engine."""
        return self._watchdog.silent_s

    def take(self, pulse: Pulse) -> None:
        """Takes the engine's answer, from any thread."""
        went_on = pulse.work != self._pulse.work or (pulse.turns != self._pulse.turns and not self._waiting())
        self._pulse = pulse
        if went_on:
            self._watchdog.went_on()

    def tick(self) -> None:
        if self._over:
            return
        if self._watchdog.tick(LONG_WORK if self._pulse.doing else 1.0):
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
