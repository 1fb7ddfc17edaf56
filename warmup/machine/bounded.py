"""Bounds how long a caller waits for work that nothing else can end, such as a look-up of a host's name."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T], name: str) -> T:
    """Does work on another thread, which is left to itself when the time is over.

    Args:
        name: of the thread.

    Raises:
        TimeoutError: it takes longer.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future.result(seconds)
