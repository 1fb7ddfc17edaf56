"""Shares CPUs among the threads of a simulation: each gets one, or an equal part where there are more threads."""

import heapq
from collections.abc import Callable
from itertools import count

import simpy


class Cpus:
    """Processor sharing, as a kernel's fair scheduler does it over some milliseconds.

    With n threads that have work on c CPUs, each goes on at min(1, c / n) of its speed; threads of other programs,
    which always have work, count among the n. Time is kept as attained
    service: how much work a thread that was there all along has been done. A piece of work ends when that has grown
    by its length, so a change of n touches no piece of work but the next to end.
    """

    def __init__(self, world: simpy.Environment, number: int, others: float = 0.0) -> None:
        """``others``: threads of other programs that have work, on average."""
        self._world, self._number, self._others = world, number, others
        self._service = self._at = 0.0
        self._running: list[tuple[float, int, simpy.Event]] = []  # a heap, by the service at which each ends
        self._order = count()
        self._alarm = 0  # the last one that was set; those before are stale

    def work(self, seconds: float) -> simpy.Event:
        """An event that comes when a thread has done so much work, in seconds of a whole CPU."""
        self._advance()
        done = self._world.event()
        heapq.heappush(self._running, (self._service + seconds, next(self._order), done))
        self._set_alarm()
        return done

    def _speed(self) -> float:
        return min(1.0, self._number / (len(self._running) + self._others)) if self._running else 0.0

    def _advance(self) -> None:
        now = self._world.now
        self._service += (now - self._at) * self._speed()
        self._at = now

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._running:
            left = max(self._running[0][0] - self._service, 0.0) / self._speed()
            alarm = self._world.timeout(left, self._alarm)
            _callbacks(alarm).append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm.value != self._alarm:
            return
        self._advance()
        self._service = max(self._service, self._running[0][0])  # not a rounding error before it
        while self._running and self._running[0][0] <= self._service:
            heapq.heappop(self._running)[2].succeed()
        self._set_alarm()


def _callbacks(event: simpy.Event) -> list[Callable[[simpy.Event], None]]:
    callbacks: list[Callable[[simpy.Event], None]] = event.callbacks
    return callbacks
