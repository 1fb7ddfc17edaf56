"""Cancels work whose client has left."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from snapcap.service.errors import ClientDisconnected

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client leaves first, cancels it and raises ClientDisconnected.

    To be called once the body has been read: whatever `receive` gives before the disconnect is dropped."""
    # In the caller's task, which is cancelled as asyncio.timeout does it: a task for the work would cost more than
    # most of what the event loop does for a request.
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
    """Cancels a task whose client has left, until `end`."""

    def __init__(self, task: "asyncio.Task[Any] | None") -> None:
        self._task = task
        self._before = 0 if task is None else task.cancelling()
        self._left = False

    def leave(self, _watcher: object) -> None:
        if self._task is not None:
            self._left = True
            self._task.cancel()

    def end(self) -> bool:
        """Takes the cancellation back, if there was one. Whether it was the only one.

        To remove the callback would not do: that of a watcher that is done has its turn on the loop already, and
        would cancel whatever the task awaits next, such as sending the reply."""
        task, self._task = self._task, None
        return task is not None and self._left and task.uncancel() <= self._before


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
