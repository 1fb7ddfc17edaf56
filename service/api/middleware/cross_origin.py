"""Lets pages of the origins that the operator named ask this server (CORS), and read what it answers.

It is around everything else: a browser shows a page no reply without these headers, so refusals have them too, and
it asks beforehand (a preflight) without a key. Imported only where an origin is allowed.
"""

import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.service.api.middleware.origins import EVERY_ORIGIN
from snapcap.service.api.middleware.request_id import HEADER, identify, request_id
from snapcap.service.api.middleware.request_log import RequestLog, note_refusal
from snapcap.service.api.problems import PROBLEM
from snapcap.service.errors import OriginRefused
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.trace_context import TRACE_ID_HEADER

API = "preflight"  # the label of preflights in metrics
MAX_AGE_S = 3600  # for which a browser need not ask again; Chromium takes two hours at most
_METHODS = ("GET", "HEAD", "POST")
# Besides those that every page may read.
_READABLE = (
    HEADER,
    TRACE_ID_HEADER,
    "X-Snapcap-Ignored",
    "Retry-After",
    "Allow",
    "WWW-Authenticate",
    "Inference-Header-Content-Length",
)


class CrossOrigin(CORSMiddleware):
    """ASGI middleware: Starlette's, whose preflights have an id, are counted and logged as requests are, and say
    what is wrong as a problem.

    Keys are sent in a header that the page sets itself, so cookies and the like (credentials, to a browser) are
    never allowed. Any header may be sent: clients have many of their own."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], metrics: Metrics) -> None:
        """`origins`: as `scheme://host:port`, or "*" for every one."""
        super().__init__(
            app,
            allow_origins=frozenset(origins),
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_READABLE,
            max_age=MAX_AGE_S,
            # A page of a public site may ask a server in a private network only where somebody named that site.
            allow_private_network=EVERY_ORIGIN not in origins,
        )
        self._metrics = metrics
        self._log = RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = Headers(scope=scope) if scope["type"] == "http" and scope["method"] == "OPTIONS" else Headers()
        if "origin" not in asks or "access-control-request-method" not in asks:
            await super().__call__(scope, receive, send)
            return
        began = time.monotonic()
        identify(scope)
        response = self._answer(scope, asks)
        try:
            await response(scope, receive, send)
        finally:
            ended = time.monotonic()
            self._metrics.request_ended(API, response.status_code, ended - began, captions=False)
            self._log.write(scope, API, response.status_code, began, ended, captions=False)

    def _answer(self, scope: Scope, asks: Headers) -> Response:
        """204, or a problem with 403 that the log's line names."""
        response = self.preflight_response(asks)
        kept = {**_kept(response), HEADER: request_id(scope)}
        if response.status_code == 200:
            return Response(status_code=204, headers=kept)
        why = bytes(response.body).decode("latin-1").removeprefix("Disallowed CORS ")
        error = OriginRefused(asks["origin"], why)
        note_refusal(scope, error)
        refused = PROBLEM.response(error, scope["path"], request_id(scope))
        refused.headers.update(kept)
        return refused


def _kept(response: Response) -> dict[str, str]:
    """The headers that are about origins."""
    return {name: value for name, value in response.headers.items() if name.startswith(("access-control", "vary"))}
