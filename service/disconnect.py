"""Stopping work whose client has left."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from service.errors import ClientDisconnected

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
        if leaving.alone():
            raise ClientDisconnected from None
        raise
    finally:
        watcher.remove_done_callback(leaving.leave)
        watcher.cancel()


class _Leaving:
    """Cancels a task whose client has left."""

    def __init__(self, task: "asyncio.Task[Any] | None") -> None:
        self._task = task
        self._before = 0 if task is None else task.cancelling()
        self._left = False

    def leave(self, _watcher: object) -> None:
        if self._task is not None:
            self._left = True
            self._task.cancel()

    def alone(self) -> bool:
        """Whether nobody else has cancelled it."""
        return self._left and self._task is not None and self._task.uncancel() <= self._before


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
