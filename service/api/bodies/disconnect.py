"""Cancels the work of a request when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from snapcap.service.errors import ClientDisconnected

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises ClientDisconnected.

    The body must have been read before the call: messages from `receive` before the disconnect are dropped."""
    # The work runs in the caller's task, which is cancelled in the same way as by asyncio.timeout. A task of its
    # own would cost more than most of the event loop's work for a request.
    leaving = _Leaving(asyncio.current_task())
    watcher = asyncio.ensure_future(_disconnect(receive))
    watcher.add_done_callback(leaving.leave)
    try:
        return await work
    except asyncio.CancelledError:
        if leaving.end():
            raise ClientDisconnected from None
        raise
    finally:
        leaving.end()
        watcher.cancel()


class _Leaving:
    """Cancels a task when its client disconnects, until `end` is called."""

    def __init__(self, task: "asyncio.Task[Any] | None") -> None:
        self._task = task
        self._before = 0 if task is None else task.cancelling()
        self._left = False

    def leave(self, _watcher: object) -> None:
        if self._task is not None:
            self._left = True
            self._task.cancel()

    def end(self) -> bool:
        """Undoes the cancellation of `leave`, if there was one. Returns True if `leave` was the only one to cancel
        the task.

        Removing the callback from the watcher would not be enough. The callback of a finished watcher is scheduled
        on the loop already, and would cancel the next await of the task, such as sending the reply."""
        task, self._task = self._task, None
        return task is not None and self._left and task.uncancel() <= self._before


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
