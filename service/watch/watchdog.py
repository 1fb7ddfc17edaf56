"""Counts ticks since something went on, and says when there have been too many.

Ticks, not seconds of a clock: a process that was stopped together with what it watches (Ctrl-Z, a paused container,
a machine that sleeps) finds one tick missed when it goes on, not an hour; and no clock that is set can end a
server. The start, the engine and the event loop have one each.
"""

from snapcap.models.errors import UserError

_TICK_S = 2.0
_SHORTEST_TICK_S = 0.1
_TICKS = 8  # of a short time limit


class StalledError(UserError):
    """A part of the server does not go on; one line that says since when."""


class Watchdog:
    """Whoever has it calls `tick` every `tick_s` seconds, and `went_on` from any thread."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds without going on that are too many; 0: none are."""
        self.timeout = timeout
        self.tick_s = min(_TICK_S, max(timeout / _TICKS, _SHORTEST_TICK_S)) if timeout else _TICK_S
        self._missed = 0

    @property
    def silent_s(self) -> float:
        """Seconds in which nothing went on, as far as ticks tell."""
        return self._missed * self.tick_s

    def went_on(self) -> None:
        self._missed = 0

    def tick(self, patience: float = 1.0) -> bool:
        """One more tick. Whether the time limit is over, or so many times the time limit."""
        self._missed += 1
        return 0 < self.timeout * patience < self.silent_s
