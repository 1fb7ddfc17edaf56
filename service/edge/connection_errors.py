"""Defines the errors of a connection before its request reaches the application, and replies with them.

ServiceError                    500
└── BadRequest                  400
    ├── MalformedRequest        400  malformed_request
    ├── HeadTimeout             408  head_timeout
    └── UrlTooLong              414  url_too_long

`service/limits.py` has the others: HeadTooLarge and TooManyConnections.
"""

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from snapcap.service.api.middleware.origins import origin_headers
from snapcap.service.api.middleware.request_id import HEADER, identify
from snapcap.service.api.problems import PROBLEM, problem
from snapcap.service.edge.connections import Connections
from snapcap.service.edge.refusal_log import NO_ROOM
from snapcap.service.errors import BadRequest, ServiceError
from snapcap.service.limits import TooManyConnections
from snapcap.service.readiness import is_probe

_ALSO_ANSWERED = frozenset({"/startup", "/metrics"})


class MalformedRequest(BadRequest):
    code = "malformed_request"
    title = "Not an HTTP request"

    def __init__(self, why: str = "its bytes are not HTTP/1.1") -> None:
        super().__init__(f"The request cannot be read: {why}.")


class HeadTimeout(BadRequest):
    status = 408
    code = "head_timeout"
    title = "Head too slow"

    def __init__(self) -> None:
        super().__init__("The head of the request took too long to arrive; send it in one piece.")


class UrlTooLong(BadRequest):
    status = 414
    code = "url_too_long"
    title = "URL too long"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The URL has more than {limit} bytes; send options in a form or in JSON.")


def last_reply(error: ServiceError, headers: Iterable[tuple[bytes, bytes]], origins: frozenset[str]) -> bytes:
    """Returns the bytes of the last reply on a connection.

    ``headers`` are the request's headers that have arrived so far, ``origins`` the origins whose pages may read the
    reply."""
    identity = f"{random.getrandbits(128):032x}"
    body = json.dumps(problem(error, "", identity)).encode()
    fields = {
        "content-type": "application/problem+json",
        "content-length": str(len(body)),
        HEADER.lower(): identity,
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
