"""Hands the results of other threads to the event loop, with one wake-up for many results."""

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
    """Hands calls and results to one event loop. The loop is woken once for all calls that arrive before it runs:
    one decode step may end many captions, and each wake-up costs a system call and the interpreter lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function on the event loop, from any thread."""
        self._calls.append(function)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed because the process ends
                self.loop.call_soon_threadsafe(self._take)

    async def result(self, future: "Future[T]", deadline: float) -> T:
        """Waits for another thread's future and returns its result. Cancelling this call cancels the future.

        Raises:
            DeadlineExceeded: `deadline`, a moment of `time.monotonic`, has passed; the future is cancelled.

        Also raises the errors of the future.
        """
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
        self._woken = False  # reset first, so that calls added during the loop below wake the event loop again
        while self._calls:
            self._calls.popleft()()


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _expire(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_exception(DeadlineExceeded())
