"""Speaks HTTP/1.1 on one connection: uvicorn's protocol with bounds on all bytes that come before the application.

The protocol counts the bytes of a message that are not its body: its head, the framing of its chunks, and its
trailers. Counting takes a few additions for each packet and each field of a head. A connection is read no faster
than its requests are answered.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sized
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from snapcap.service.errors import NotReady, ServiceError
from snapcap.service.http.connections import (
    NO_ROOM,
    Connections,
    HeadTimeout,
    MalformedRequest,
    ProbesOnly,
    UrlTooLong,
    last_reply,
)
from snapcap.service.http.middleware import note_cut
from snapcap.service.limits import HeadTooLarge, TooManyConnections

# Number of requests that may wait behind the one that is answered. Hardly any client sends a request ahead.
_MAX_PIPELINED = 8
# Bytes of a URL, of which a query may have 8 KiB. The event loop decodes the path before any route is known.
_LONGEST_URL = 10 << 10
_ABSOLUTE = re.compile(rb"https?://(?:[^/?#@]*@)?([^/?#]*)", re.IGNORECASE)
_VERSIONS = ("1.1", "1.0")
_EMPTY_LINES = (b"\r\n", b"\n")  # old clients send them after a body, and RFC 9112 has a server ignore them
# The part of a message that is read next. `_BETWEEN` is the state before the first byte of a message.
_BETWEEN, _HEAD, _BODY = range(3)
# Seconds between two packets that are dropped. Without a pause, libuv reads thirty packets of a connection before
# it does anything else.
_DROP_S = 0.002
_NEGOTIATION = frozenset({b"upgrade", b"http2-settings"})


class _Refused(Exception):  # noqa: N818 - the error is its attribute
    """Ends the parsing from within a callback of the parser."""

    def __init__(self, error: ServiceError, reason: str) -> None:
        self.error = error
        self.reason = reason


class Flow(FlowControl):
    """Pauses reading while a request of the connection waits for the reply to the request before it. `waiting`
    holds these requests."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self._loop = loop
        self._dropping = False

    def resume_reading(self) -> None:
        if not self._waiting and not self._dropping:
            super().resume_reading()

    def drop(self) -> None:
        """Pauses reading for a moment, because the bytes that arrived were dropped."""
        if not self._dropping:
            self._dropping = True
            self.pause_reading()
            self._loop.call_later(_DROP_S, self._go_on)

    def _go_on(self) -> None:
        self._dropping = False
        if not self._transport.is_closing():
            self.resume_reading()


class _Replies:
    """Stands for the transport in the requests of a connection, each of which may close the connection after its
    reply."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing = transport.write, transport.is_closing
        self.close = close


class BoundedHttpProtocol(HttpToolsProtocol):
    """Speaks HTTP/1.1 on one connection. `watch` holds all connections of the server."""

    def __init__(
        self,
        watch: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._watch = watch
        self._limits = watch.limits
        self._part = _BETWEEN
        self._wire = 0  # bytes of the message that have arrived
        self._body = 0  # bytes of the body among them
        self._left = 0  # bytes that the message's head and trailers may still have
        self._codings: list[bytes] = []
        self.headers: list[tuple[bytes, bytes]] = []  # fields of the last head that have arrived
        self._refused = False  # the connection gets its last reply: bytes that arrive are dropped
        self._closes = False  # the connection is closed at the end of the body that arrives, which has its reply
        self._running: RequestResponseCycle | None = None  # the last request that the application was given
        self.unsent_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: Flow = Flow(transport, self.pipeline, self.loop)
        self._replies = _Replies(transport, self._close_after_reply)
        try:
            if not self._watch.admit(self, self.loop.time()):
                self.app = ProbesOnly(self.app, self._watch)
        except ConnectionRefusedError:
            self.no_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.forget(self)
        self._replies.close = self.transport.close  # no cycle of references, which only the collector would free
        self.pipeline.clear()
        if self._running is not None:  # uvicorn forgets this request if others wait behind it
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self.flow.drop()
            return
        if data in _EMPTY_LINES and self._running is not None and self._part == _BETWEEN and not self._wire:
            return
        self._watch.idle.pop(self, None)
        self._wire += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            why = cause if isinstance(cause, _Refused) else _Refused(MalformedRequest(), "malformed")
            self._refuse(why.error, why.reason)
            return
        # The framing of chunks may have as many bytes as the body, and as many again as a head.
        if self._wire - 2 * self._body > self._limits.max_header_bytes:
            self._check_framing()
        if self._part == _BODY or self._answering():
            return
        if self._part == _HEAD or self._wire:
            self._watch.heads.setdefault(self, self.loop.time())
        else:
            self._watch.idle[self] = self.loop.time()

    def unsent(self) -> int:
        """Returns the number of reply bytes that the client has not received."""
        return self.transport.get_write_buffer_size()

    def close_idle(self) -> None:
        """Closes the connection, which has no request."""
        if self.unsent():  # `close` would wait until the client reads, which it may never do
            self.transport.abort()
        else:
            self.transport.close()

    def no_room(self) -> None:
        """Replies that the server has no room for the connection, and closes it."""
        self._refused = True
        error = TooManyConnections()
        self._watch.refusals.write(error, NO_ROOM, self.client)
        if not self.unsent():
            self.transport.write(last_reply(error, self.headers, self._watch.origins))
        self.transport.close()

    def head_late(self) -> None:
        """Replies that the head of the request came too slowly, and closes the connection."""
        self._refuse(HeadTimeout(), "head_timeout")

    def rest_late(self) -> None:
        """Closes the connection, whose request has its reply but does not end."""
        if not self._refused:
            self._watch.count("body_left_over")
        self.transport.abort()

    def abort(self) -> None:
        """Closes the connection at once, even if bytes of a reply are lost."""
        self.transport.abort()

    def give_up(self) -> None:
        """Refuses a request whose reply has not begun, and closes the connection, because the server ends."""
        self._refused = True
        self.pipeline.clear()
        if self.unsent_since is not None:
            self.transport.abort()
        elif self._answering():
            self._reply_last(NotReady("draining"))
        self.transport.close()

    def on_message_begin(self) -> None:
        self._part = _HEAD
        self._left = self._limits.max_header_bytes
        if self._codings:
            self._codings = []
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._left -= len(url)
        self.url += url
        if self._left < 0 or len(self.url) > _LONGEST_URL:
            raise _Refused(UrlTooLong(min(self._limits.max_header_bytes, _LONGEST_URL)), "head_too_large")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._left -= len(name) + len(value) + 4
        if self._left < 0:
            raise _Refused(HeadTooLarge(self._limits.max_header_bytes, "bytes"), "head_too_large")
        if self._part == _BODY:
            return  # RFC 9110 forbids taking a trailer for a field of the head
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"transfer-encoding":
            self._codings.append(value.lower())
        headers = self.headers
        headers.append((name, value))
        if len(headers) > self._limits.max_headers:
            raise _Refused(HeadTooLarge(self._limits.max_headers, "fields"), "head_too_large")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_parse` parses the head again, without the upgrade
        if self._codings and (self._codings != [b"chunked"] or self.parser.get_http_version() != "1.1"):
            # RFC 9112 has 501 here, but at 501 a load balancer may take the server out of service, so a client
            # could cause that.
            raise _Refused(
                MalformedRequest("its Transfer-Encoding is not `chunked`, or it is not HTTP/1.1"), "malformed"
            )
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _Refused(MalformedRequest("too many requests before it wait for their replies"), "malformed")
        self._watch.heads.pop(self, None)
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # RFC 9110 forbids 100 Continue in HTTP/1.0
        if (absolute := _ABSOLUTE.match(self.url)) is not None:  # RFC 9112: its authority replaces the Host header
            self.headers[:] = [(name, absolute[1] if name == b"host" else value) for name, value in self.headers]
        super().on_headers_complete()
        self.cycle.transport = self._replies  # type: ignore[assignment]
        self._part = _BODY
        if self.scope["http_version"] not in _VERSIONS:
            raise _Refused(MalformedRequest("its version is not HTTP/1.1"), "malformed")
        hosts = [name for name, _ in self.headers].count(b"host")
        if hosts > 1 or (hosts == 0 and self.scope["http_version"] == "1.1"):
            raise _Refused(MalformedRequest("it has no Host header, or several"), "malformed")

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        cycle = self.cycle
        if cycle.response_complete:
            self.flow.drop()
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._part != _BODY:
            return  # the message is parsed again, without the upgrade
        self._part = _BETWEEN
        self._wire = self._body = 0
        if self.cycle.response_complete:
            self._watch.rests.pop(self, None)
            if self._closes:
                self.transport.close()
            return
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._part == _BODY:
            self._watch.rests[self] = self.loop.time()
        elif self._part == _HEAD or self._wire:
            self._watch.heads[self] = self.loop.time()
        else:
            self._watch.idle[self] = self.loop.time()
        self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Feeds the parser, and removes an offered upgrade from the request. Raises httptools.HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # Java's client offers HTTP/2 with the first request of a connection. The parser ends such a message
                # at its head and loses its body, so it is given the same request again, without the offer.
                method, version = self.parser.get_method(), self.parser.get_http_version()
                head = head_without_upgrade(method, self.url, version, self.headers)
                data = head + data[upgrade.args[0] :]
                # The parser is replaced, because after `Connection: close` it would drop all further bytes.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # uvicorn sets the same

    def _check_framing(self) -> None:
        limit = self._limits.max_header_bytes
        if self._part != _BODY:
            self._refuse(HeadTooLarge(limit, "bytes"), "head_too_large")
        elif self._wire - 2 * self._body > 2 * limit:
            self._refuse(MalformedRequest("its chunks have more bytes of framing than of content"), "malformed")

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_after_reply(self) -> None:
        """Closes the connection after the last reply. If the body of the request is still arriving, the connection
        is closed at the end of the body: closed at once, it would be reset by the next bytes of the body, and the
        client might not receive the reply."""
        if self._part == _BODY and self.cycle.response_complete and not self._refused:
            self._closes = True
            self.transport.write_eof()
        else:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if self._closes:  # the client said that the request before this one is the last
            return
        self._running = cycle
        super()._start_asgi_task(cycle, _until_closed(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _refuse(self, error: ServiceError, reason: str) -> None:
        """Refuses the message that is being read, and drops all later bytes. Requests before it are answered."""
        if self._refused:
            return
        self._refused = True
        self._watch.count(reason)
        self._watch.refusals.write(error, reason, self.client)
        in_body, answering = self._part == _BODY, self._answering()
        if in_body and answering and not self.pipeline:
            self._reply_last(error)
        elif answering:
            if in_body:
                self.pipeline.popleft()  # the refused message itself, which was queued last
            last = self.pipeline[0][0] if self.pipeline else self._running
            if last is not None:
                last.keep_alive = False
        elif in_body:
            self.transport.close()  # the refused message has its reply already
        else:
            self._reply_last(error)

    def _reply_last(self, error: ServiceError) -> None:
        """Sends an error in place of the application's reply, unless that reply has begun. Bytes that still arrive
        are dropped for a while: if the connection were closed at once, the client might not receive the reply."""
        cycle, answering = self._running, self._answering()
        identity = None
        if cycle is not None and answering:
            state = cycle.scope["state"]
            identity = state.get("request_id")  # None if the application has not begun
            note_cut(state, error)
            cycle.disconnected = True
            cycle.message_event.set()
            self.flow.resume_writing()
        if self.transport.is_closing() or (cycle is not None and answering and cycle.response_started):
            self.transport.close()
            return
        self.transport.write(last_reply(error, self.headers, self._watch.origins, identity))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._watch.heads.pop(self, None)
        self._watch.rests[self] = self.loop.time()


def _until_closed(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """Wraps the application for a client of HTTP/1.0, so that replies have no chunks: RFC 9112 forbids them there,
    but uvicorn sends them. A reply without a Content-Length ends with the connection, which uvicorn closes after
    each `cycle` of such a client."""

    async def unframed(scope: Any, receive: Any, send: Any) -> None:
        unknown = False

        async def send_plain(message: Any) -> None:
            nonlocal unknown
            if message["type"] == "http.response.start":
                unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if unknown else None
            elif unknown:  # uvicorn checks the length of each part, and the length of the whole is not known
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return unframed


def head_without_upgrade(method: bytes, url: bytes, version: str, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the bytes of the head without the offer. All other fields stay unchanged and in their order, so that
    the head is parsed as strictly as before.

    Raises httptools.HttpParserError for CONNECT, which only a proxy answers."""
    if method == b"CONNECT":
        raise httptools.HttpParserError("CONNECT")
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    for name, value in fields:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            kept = [token for token in tokens if token.lower() not in _NEGOTIATION]
            if kept:
                lines.append(b"connection: " + b", ".join(kept))
        elif name not in _NEGOTIATION:
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])
