"""Hands the results of other threads to the event loop, which is woken once for many."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from snapcap.service.errors import DeadlineExceeded

T = TypeVar("T")


class LoopHandoff:
    """Belongs to one event loop, which is woken once for all that arrives before it looks: a decode step may end
    many captions, and to wake the loop costs a system call and a turn with Python's lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False

    def call(self, function: Callable[[], object]) -> None:
        """Call it on the event loop; from any thread."""
        self._calls.append(function)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop has been closed: the process ends
                self.loop.call_soon_threadsafe(self._take)

    async def result(self, future: "Future[T]", deadline: float) -> T:
        """The result of another thread's future, which is cancelled with this call.

        Raises DeadlineExceeded, and cancels the future, at ``deadline``, a moment of ``time.monotonic``."""
        waiter: asyncio.Future[None] = self.loop.create_future()
        future.add_done_callback(lambda _: self.call(partial(_wake, waiter)))
        timer = self.loop.call_later(deadline - time.monotonic(), _expire, waiter)
        try:
            await waiter
        except BaseException:
            future.cancel()
            raise
        finally:
            timer.cancel()
        return future.result()

    def _take(self) -> None:
        self._woken = False  # before looking: what comes after that wakes the loop again
        while self._calls:
            self._calls.popleft()()


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _expire(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_exception(DeadlineExceeded())
