"""Watches the device thread from outside: it must go on while there is work, and answer when there is none.

    every tick      ── beat ──▶  the engine, which wakes its device thread
    take            ◀─ pulse ──  its turns, and those in which it did something

Without requests a turn is enough, which touches no device. With requests it must have done something: a thread that
only spins does not count.
"""

from collections.abc import Callable

from snapcap.service.engine.remote.messages import Pulse
from snapcap.service.watch.watchdog import StalledError, Watchdog

# Longer than any step: to run a bucket for the first time, to open packages and compare what they compute.
LONG_WORK = 10.0


class EngineWatch:
    """`tick` is called every `tick_s` seconds once the engine serves."""

    def __init__(
        self,
        timeout: float,
        beat: Callable[[], object],
        waiting: Callable[[], bool],
        stalled: Callable[[StalledError], object],
    ) -> None:
        """`timeout`: seconds, 0 for no limit. `beat` asks for a pulse, `waiting` is whether requests are on their
        way through the engine, `stalled` is called once."""
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
        """Seconds in which the engine has not gone on, though it should have."""
        return self._watchdog.silent_s

    def take(self, pulse: Pulse) -> None:
        """What the engine has answered, from any thread."""
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
        return f"the engine has not gone on for {self.silent_s:.0f} s, {what}"
