"""Writes replies: JSON at once, or server-sent events until the client disconnects."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from snapcap.service.errors import ClientDisconnected

RawHeaders: TypeAlias = tuple[tuple[bytes, bytes], ...]
IGNORED = "X-Snapcap-Ignored"  # names the ignored parts of a request
_REFUSED_TYPE = re.compile(r";\s*q=0(?:\.0*)?\s*(?:;|$)")  # the weight in Accept of a type that the client refuses
_MOST_NAMES, _LONGEST_NAME = 16, 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_TYPE = (b"content-type", b"application/json")
# All replies share this encoder: `json.dumps` with these options would make one for each reply.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
T = TypeVar("T")


def ignored_names(names: Sequence[str]) -> str:
    """Returns the names of the ignored parts of a request in a line, or "" if none was ignored. The names come from
    the client, so they are cut short and characters with a meaning in headers are replaced."""
    distinct = list(dict.fromkeys(_UNSAFE.sub("?", name[:_LONGEST_NAME]) or "?" for name in names))
    more = len(distinct) - _MOST_NAMES
    return ", ".join([*distinct[:_MOST_NAMES], *([f"and {more} more"] if more > 0 else [])])


def ignored_header(names: Sequence[str]) -> RawHeaders:
    """Returns the header that names the ignored parts of a request, or () if none was ignored."""
    shown = ignored_names(names)
    return ((IGNORED.lower().encode(), shown.encode()),) if shown else ()


def accepted_types(request: Request) -> str:
    """Returns the types of the Accept headers in lower case, without those that the client refuses."""
    given = ",".join(request.headers.getlist("accept")).lower().split(",")
    return ",".join(each for each in given if not _REFUSED_TYPE.search(each))


class JsonReply(Response):
    """Sends JSON with status 200. Faster than Starlette's JSONResponse: takes raw headers, without a mapping."""

    def __init__(self, content: Mapping[str, Any] | list[Any], headers: RawHeaders = ()) -> None:
        # Sets all attributes that the base class's __init__, which is not called, would set.
        self.status_code = 200
        self.background = None
        try:
            self.body = _encode(content).encode()
        except ValueError:  # NaN or infinity, which are written as null
            from pydantic_core import to_json  # noqa: PLC0415  few replies need it

            self.body = to_json(content, inf_nan_mode="null")
        self.raw_headers = [(b"content-length", b"%d" % len(self.body)), _TYPE, *headers]


class EventStream(Response):
    """Sends server-sent events. `events`: yields the data of each event. `note`: called with the error if the
    client disconnects; no other code may handle the error, as the reply has begun. `close`: called at the end in
    any case."""

    media_type = "text/event-stream"
    frame = "data: {}\n\n"  # around the data of each event

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        close: Callable[[], object],
        note: Callable[[ClientDisconnected], object],
        headers: RawHeaders = (),
    ) -> None:
        # Without X-Accel-Buffering, nginx holds events back until they fill its buffer.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.raw_headers.extend(headers)
        self._events = events
        self._close = close
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_disconnected(receive, self._send(send))
        except ClientDisconnected as error:
            self._note(error)
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for data in events:
                await send(
                    {"type": "http.response.body", "body": self.frame.format(data).encode(), "more_body": True}
                )
        await send({"type": "http.response.body", "body": b""})


class NamedEventStream(EventStream):
    """Sends server-sent events that have names. Each is given as its name, a line break, `data: ` and its data."""

    frame = "event: {}\n\n"


class LineStream(EventStream):
    """Sends JSON documents, each on a line of its own."""

    media_type = "application/x-ndjson"
    frame = "{}\n"


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
