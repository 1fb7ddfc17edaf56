"""Watches the connections of the server: counts them, and closes those that wait too long for their clients.

A request that is refused before it reaches the application gets the last reply of its connection, and a line in the
log. Its error is one of these, or HeadTooLarge or TooManyConnections of `service/limits.py`:

ServiceError                    500
└── BadRequest                  400
    ├── MalformedRequest        400  malformed_request
    ├── HeadTimeout             408  head_timeout
    └── UrlTooLong              414  url_too_long
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from snapcap.service.config.settings import HttpLimits
from snapcap.service.errors import BadRequest, ServiceError
from snapcap.service.http.access import origin_headers
from snapcap.service.http.middleware import REQUEST_ID_HEADER, identify
from snapcap.service.http.problems import PROBLEM, problem
from snapcap.service.limits import TooManyConnections
from snapcap.service.readiness import is_probe

if TYPE_CHECKING:
    from snapcap.service.http.protocol import BoundedHttpProtocol

# Seconds between two checks of all connections.
_INTERVAL = 1.0
# Seconds that a connection must have waited before it is closed to make room: a younger one may have sent bytes
# that this process has not read yet.
_YOUNG = 1.0
# Seconds for which the rest of a request is read and dropped once its reply was sent: if the connection were closed
# at once, the client might not receive the reply.
_LINGER = 10.0
MOST_CONNECTIONS = 4096  # greatest number of connections, unless the operator sets another
# Number of connections beyond the limit, for probes only.
SPARE = 64
# Seconds that an exit, or a new connection that needs the place, waits for a client that does not read its reply.
_UNREAD = 3.0
NO_ROOM = "max_connections"
# Seconds between two log lines of refused connections: a client can open any number of them beyond the limit.
_SECONDS_BETWEEN = 1.0
_logger = logging.getLogger("snapcap.access")
# Paths that are answered on connections beyond the limit, besides those of probes.
_ALSO_ANSWERED = frozenset({"/startup", "/metrics"})


class Connections:
    """Watches the connections of one event loop. `count` is called with a reason of `telemetry.metrics.CLOSED` for
    each connection that is refused, or closed because of its client.

    Three tables hold the connections that wait for their clients, each in the order in which the waits began:
    `idle` for the next request, `heads` for the rest of a head, and `rests` for the end of a request that has its
    reply."""

    def __init__(
        self,
        limits: HttpLimits,
        count: Callable[[str], object] = lambda _: None,
        origins: frozenset[str] = frozenset(),
    ) -> None:
        """`origins` are the origins whose pages may read in a browser why a connection was refused."""
        self.limits = limits
        self._most = limits.max_connections or MOST_CONNECTIONS
        self.origins = origins
        self.refusals = RefusalLog()
        self.count = count
        self.all: set[BoundedHttpProtocol] = set()
        self._leaving: set[BoundedHttpProtocol] = set()  # connections that are being closed and hold no place
        self.idle: dict[BoundedHttpProtocol, float] = {}
        self.heads: dict[BoundedHttpProtocol, float] = {}
        self.rests: dict[BoundedHttpProtocol, float] = {}
        self._spare: dict[BoundedHttpProtocol, None] = {}  # connections beyond the limit, the oldest first
        self._send_timeout = limits.send_timeout
        self._timer: asyncio.TimerHandle | None = None

    @property
    def crowded(self) -> bool:
        """Tells if there are more connections than the limit, so that only probes are answered on the spare
        ones."""
        return self._count() > self._most

    def admit(self, connection: "BoundedHttpProtocol", now: float) -> bool:
        """Adds a connection. Returns whether it has a place within the limit; if not, only its probes are answered.

        Raises ConnectionRefusedError if there is no spare place either."""
        room = self._count() < self._most or self._make_room(now)
        if not room and self._count() >= self._most + SPARE:
            self.count("max_connections")
            self._make_spare_room()
        self.all.add(connection)
        self.idle[connection] = now
        if not room:
            self._spare[connection] = None
        return room

    def forget(self, connection: "BoundedHttpProtocol") -> None:
        """Removes a connection that was closed."""
        self.all.discard(connection)
        self._leaving.discard(connection)
        self._wait_no_more(connection)

    def start(self) -> None:
        """Begins to check the connections, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._look(loop, loop.time() + _INTERVAL)

    def stop(self) -> None:
        """Ends the checks."""
        if self._timer is not None:
            self._timer.cancel()

    def exit(self) -> None:
        """Shortens the time that a reply may be left unread, because the server is about to end."""
        self._send_timeout = min(self._send_timeout, _UNREAD)

    def give_up(self) -> None:
        """Gives up all connections, because the server ends now."""
        for connection in list(self.all):
            self.count("grace_period")
            connection.give_up()

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        # After the loop was blocked no client counts as late: its bytes may not have been read yet.
        if now - due < _INTERVAL:
            self._expire(now)
        self._timer = loop.call_later(_INTERVAL, self._look, loop, now + _INTERVAL)

    def _expire(self, now: float) -> None:
        for connection in _older(self.heads, now - self.limits.header_timeout):
            connection.head_late()
        for connection in _older(self.idle, now - self.limits.keep_alive_timeout):
            connection.close_idle()
        for connection in _older(self.rests, now - _LINGER):
            connection.rest_late()
        for connection in list(self.all):
            if not connection.unsent():
                connection.unsent_since = None
            elif connection.unsent_since is None:
                connection.unsent_since = now
            elif now - connection.unsent_since >= (_UNREAD if connection in self._leaving else self._send_timeout):
                self.count("send_timeout")
                connection.abort()

    def _make_room(self, now: float) -> bool:
        """Closes the connection that waits the longest for its client. Returns False if none has waited long
        enough."""
        first = [next(iter(table.items())) for table in (self.idle, self.heads, self.rests) if table]
        if not first:
            return False
        connection, since = min(first, key=lambda each: each[1])
        if now - since < _YOUNG:
            return False
        self.count("made_room")
        self._let_go(connection)
        connection.close_idle()
        return True

    def _make_spare_room(self) -> None:
        """Closes the oldest connection beyond the limit that waits for its client, however short the wait: a probe
        sends its request at once, and reads its reply. Raises ConnectionRefusedError if none waits."""
        for connection in self._spare:
            if connection in self.idle or connection in self.heads:
                self._let_go(connection)
                connection.no_room()
                return
        for connection in self._spare:
            if connection in self.rests or connection.unsent():
                self._let_go(connection)
                connection.abort()
                return
        raise ConnectionRefusedError

    def _let_go(self, connection: "BoundedHttpProtocol") -> None:
        """Frees the place of a connection that is about to be closed. The connection is watched until it is."""
        self._leaving.add(connection)
        self._wait_no_more(connection)

    def _wait_no_more(self, connection: "BoundedHttpProtocol") -> None:
        self._spare.pop(connection, None)
        for table in (self.idle, self.heads, self.rests):
            table.pop(connection, None)

    def _count(self) -> int:
        return len(self.all) - len(self._leaving)


def _older(table: "dict[BoundedHttpProtocol, float]", than: float) -> "list[BoundedHttpProtocol]":
    """Returns the connections that have waited since the moment `than` or longer."""
    found = []
    for connection, since in table.items():
        if since > than:
            break
        found.append(connection)
    return found


class RefusalLog:
    """Logs the requests of one server that are refused before they reach the application."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = float("-inf")
        self._left_out = 0

    def write(self, error: ServiceError, reason: str, client: tuple[str, int] | None) -> None:
        """Logs a refusal. `reason` is one of `telemetry.metrics.CLOSED`, `client` the address and port of the
        client. The field `left_out` counts the refusals that were not logged since the last line."""
        address = client[0] if client else ""
        fields: dict[str, object] = {
            "status": error.status,
            "client": address,
            "code": error.code,
            "reason": reason,
        }
        if reason == NO_ROOM:
            now = self._clock()
            if now - self._last < _SECONDS_BETWEEN:
                self._left_out += 1
                return
            if self._left_out:
                fields["left_out"] = self._left_out
            self._last, self._left_out = now, 0
        _logger.info("request refused", extra={"fields": fields})


class MalformedRequest(BadRequest):
    title = "Not an HTTP request"

    def __init__(self, why: str = "its bytes are not HTTP/1.1") -> None:
        super().__init__(f"The request cannot be read: {why}.")


class HeadTimeout(BadRequest):
    status = 408
    title = "Head too slow"

    def __init__(self) -> None:
        super().__init__("The head of the request took too long to arrive; send it in one piece.")


class UrlTooLong(BadRequest):
    status = 414
    title = "URL too long"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The URL has more than {limit} bytes; send options in a form or in JSON.")


def last_reply(
    error: ServiceError,
    headers: Iterable[tuple[bytes, bytes]],
    origins: frozenset[str],
    identity: str | None = None,
) -> bytes:
    """Returns the bytes of the last reply on a connection.

    ``headers`` are the request's headers that have arrived so far, ``origins`` the origins whose pages may read the
    reply. ``identity``: the request's id, which its log line has; None makes a new one."""
    identity = identity or f"{random.getrandbits(128):032x}"
    body = json.dumps(problem(error, "", identity)).encode()
    fields = {
        "content-type": "application/problem+json",
        "content-length": str(len(body)),
        REQUEST_ID_HEADER.lower(): identity,
        **error.headers(),
        **_shown(headers, origins),
        "connection": "close",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return STATUS_LINE[error.status] + head.encode("latin-1") + b"\r\n" + body


class ProbesOnly:
    """ASGI application of a connection beyond the limit: answers only probes until there is room again."""

    def __init__(self, app: ASGI3Application, watch: Connections) -> None:
        self._app = app
        self._watch = watch

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        probes = is_probe(scope["path"]) or scope["path"] in _ALSO_ANSWERED
        probes = probes and scope["method"] in ("GET", "HEAD")
        if probes or not self._watch.crowded:
            await self._app(scope, receive, send)
            return
        error = TooManyConnections()
        self._watch.count(NO_ROOM)
        self._watch.refusals.write(error, NO_ROOM, scope.get("client"))
        response = PROBLEM.response(error, scope["path"], identify(scope))
        response.headers.update({**_shown(scope["headers"], self._watch.origins), "connection": "close"})
        await response(scope, receive, send)


def _shown(headers: Iterable[tuple[bytes, bytes]], origins: frozenset[str]) -> Mapping[str, str]:
    """Returns the CORS headers of a refusal, without which a browser does not show a page the reason."""
    return origin_headers(next((value for name, value in headers if name == b"origin"), None), origins)
