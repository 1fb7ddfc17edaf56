"""Writes replies: JSON at once, or server-sent events, whose source is left as soon as the client leaves."""

import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from snapcap.service.api.bodies.disconnect import unless_disconnected
from snapcap.service.errors import ClientDisconnected

RawHeaders: TypeAlias = tuple[tuple[bytes, bytes], ...]
IGNORED = "X-Snapcap-Ignored"  # names what of a request has no part in its caption
_MOST_NAMES, _LONGEST_NAME = 16, 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_TYPE = (b"content-type", b"application/json")
# One for all replies: `json.dumps` makes one for each.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def ignored_header(names: Sequence[str]) -> RawHeaders:
    """The header that names what of a request was ignored, if anything. The names are the client's: they are cut
    short, and hold no character that means something in a header."""
    distinct = list(dict.fromkeys(_UNSAFE.sub("?", name[:_LONGEST_NAME]) or "?" for name in names))
    more = len(distinct) - _MOST_NAMES
    shown = ", ".join([*distinct[:_MOST_NAMES], *([f"and {more} more"] if more > 0 else [])])
    return ((IGNORED.lower().encode(), shown.encode()),) if shown else ()


class JsonReply(Response):
    """A JSONResponse of status 200 whose head is not put together from a mapping of headers."""

    def __init__(self, content: Mapping[str, Any] | list[Any], headers: RawHeaders = ()) -> None:
        # Not the base class's: all that it would do is here.
        self.status_code = 200
        self.background = None
        self.body = _bytes(content)
        self.raw_headers = [(b"content-length", b"%d" % len(self.body)), _TYPE, *headers]


def _bytes(content: Mapping[str, Any] | list[Any]) -> bytes:
    """Numbers that JSON does not know are null."""
    try:
        return _encode(content).encode()
    except ValueError:
        from pydantic_core import to_json  # noqa: PLC0415  which no start needs

        return to_json(content, inf_nan_mode="null")


class EventStream(Response):
    """`events` gives the data of each event. `close` is called at the end, whatever it is; before that `note`, with
    the error, if the client left: the reply has begun, so nobody else is to handle it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        close: Callable[[], object],
        note: Callable[[ClientDisconnected], object],
        headers: RawHeaders = (),
    ) -> None:
        # nginx would collect the events until they fill its buffer.
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
                await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
