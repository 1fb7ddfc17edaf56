"""Lets time pass when a test says so, so that a time limit is over at that moment and at no other."""

import asyncio
import time
from typing import Any


class ModuleClock:
    """Stands in for the module `time` in a module under test. `monotonic` stands still until the test moves it."""

    def __init__(self) -> None:
        self._now = time.monotonic()

    def monotonic(self) -> float:
        return self._now

    def forward(self, seconds: float) -> None:
        self._now += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def pass_on_loop(seconds: float) -> None:
    """Moves the clock of the running event loop: timers that were due within so many seconds are due now."""
    loop: Any = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds
