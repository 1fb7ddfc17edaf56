"""Lets pages of allowed origins send requests to this server and read the replies (CORS).

This is the outermost middleware. A browser hides a reply without CORS headers from the page, so refusals need them
too, and its preflight requests have no key. The module is imported only if the operator allows an origin.
"""

import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.service.errors import OriginRefused
from snapcap.service.http.access import EVERY_ORIGIN
from snapcap.service.http.middleware import REQUEST_ID_HEADER, RequestLog, identify, note_refusal, request_id
from snapcap.service.http.problems import PROBLEM
from snapcap.service.http.replies import IGNORED
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.tracing import TRACE_ID_HEADER

API = "preflight"  # the label of preflights in metrics
MAX_AGE_S = 3600  # how long a browser may cache a preflight; Chromium caches for two hours at most
_METHODS = ("GET", "HEAD", "POST")
# The response headers a page may read, besides those that any page may read.
_READABLE = (
    REQUEST_ID_HEADER,
    TRACE_ID_HEADER,
    IGNORED,
    "Retry-After",
    "Allow",
    "WWW-Authenticate",
    "Inference-Header-Content-Length",
)


class CrossOrigin(CORSMiddleware):
    """Extends Starlette's ASGI middleware: preflights have an id, are counted and logged like requests, and are
    refused with a problem.

    Credentials in the browser's sense, such as cookies, are never allowed: a page sends its key in a header that it
    sets itself. All request headers are allowed, as clients send many of their own."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], metrics: Metrics) -> None:
        """`origins`: allowed origins, each as `scheme://host:port`, or "*" for any origin."""
        super().__init__(
            app,
            allow_origins=frozenset(origins),
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_READABLE,
            max_age=MAX_AGE_S,
            # "*" does not let pages of public sites reach a server in a private network: a site must be named for
            # that.
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
        """Returns the reply to a preflight: 204, or 403 with a problem, which it notes for the log line."""
        response = self.preflight_response(asks)
        kept = {**_kept(response), REQUEST_ID_HEADER: request_id(scope)}
        if response.status_code == 200:
            return Response(status_code=204, headers=kept)
        why = bytes(response.body).decode("latin-1").removeprefix("Disallowed CORS ")
        error = OriginRefused(asks["origin"], why)
        note_refusal(scope, error)
        refused = PROBLEM.response(error, scope["path"], request_id(scope))
        refused.headers.update(kept)
        return refused


def _kept(response: Response) -> dict[str, str]:
    """Returns the headers of a response that concern CORS."""
    return {name: value for name, value in response.headers.items() if name.startswith(("access-control", "vary"))}
