"""Counts ticks since the last progress, and tells when there have been too many.

A watchdog counts ticks and not seconds of a clock. A process that was stopped together with the watched one
(Ctrl-Z, a paused container, a machine that sleeps) has missed one tick when it continues, not an hour, and setting
a clock cannot end a server. The start, the engine and the event loop have a watchdog each.
"""

from snapcap.models.errors import UserError

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
