"""Wraps every request: gives it an id, counts and logs it, and answers any exception."""

import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapcap.service.api.middleware.problem_handler import ProblemHandler
from snapcap.service.api.middleware.request_id import HEADER, identify, trace_id
from snapcap.service.api.middleware.request_log import RequestLog
from snapcap.service.api.middleware.request_spans import begin_span, end_span
from snapcap.service.api.problems import forget_frames
from snapcap.service.memory import body_account
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.trace_context import TRACE_ID_HEADER
from snapcap.service.telemetry.tracing import Tracing

PREFIX = "prefix"  # key in the request's state: the path prefix set by the operator or the host application
_HEADER = HEADER.lower().encode()
_TRACE_HEADER = TRACE_ID_HEADER.lower().encode()


class RequestScope:
    """Wraps an ASGI application. Counts caption requests as in flight; other requests are probes and pages.

    Exceptions end here, so that every reply has an id and the HTTP server logs none."""

    def __init__(self, app: ASGIApp, metrics: Metrics, handler: ProblemHandler, root_path: str = "") -> None:
        """`root_path`: the prefix under which a proxy serves all paths. Requests may contain the prefix or not."""
        self._app = app
        self._metrics = metrics
        self._handler = handler
        self._root_path = root_path
        self._log = RequestLog()
        self.tracing: Tracing | None = None  # set later: its module is imported after /livez answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        identity = identify(scope)
        routed = _routed(scope, self._root_path)
        api = self._handler.apis.of(routed["method"], routed["path"])
        span = begin_span(self.tracing, scope) if self.tracing is not None and api.captions else None
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (_HEADER, identity.encode())]
                if (trace := trace_id(scope)) is not None:
                    headers.append((_TRACE_HEADER, trace.encode()))
                message = {**message, "headers": headers}
            await send(message)

        if api.captions:
            self._metrics.requests_in_flight.inc()
        try:
            await self._app(routed, receive, send_with_id)
        except Exception as error:
            response = await self._handler(Request(routed), error)
            forget_frames(error)
            if status is None:
                await response(scope, receive, send_with_id)
        finally:
            account = body_account(scope)
            if account is not None:
                account.release()
            if api.captions:
                self._metrics.requests_in_flight.dec()
            status = 499 if status is None else status  # cancelled when the grace period ended
            ended = time.monotonic()
            self._metrics.request_ended(api.label, status, ended - began, captions=api.captions)
            if span is not None:
                end_span(span, scope, status)
            self._log.write(scope, api.label, status, began, ended, captions=api.captions)


def _routed(scope: Scope, root_path: str) -> Scope:
    """Returns the scope for the routes: without the prefix of a host or proxy, and with GET for HEAD. The server
    leaves out the body of a reply to HEAD."""
    prefix = scope.get("root_path", "").rstrip("/") or root_path
    if not prefix and scope["method"] != "HEAD":
        return scope
    scope["state"][PREFIX] = prefix
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    path = scope["path"]
    if f"{path}/".startswith(f"{prefix}/"):  # "/caption" does not have the prefix "/cap"
        path = path.removeprefix(prefix) or "/"
    return {**scope, "method": method, "path": path, "root_path": ""}
