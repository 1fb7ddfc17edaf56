"""Wraps every request: gives it an id, counts and logs it, and replies whatever happens."""

import logging
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapcap.service.api.middleware.problem_handler import ProblemHandler
from snapcap.service.api.middleware.request_id import HEADER, identify
from snapcap.service.api.problems import forget_frames
from snapcap.service.api.routing import Api
from snapcap.service.memory.bodies import body_account
from snapcap.service.telemetry.metrics import Metrics

_HEADER = HEADER.lower().encode()
_logger = logging.getLogger("snapcap.access")


class RequestScope:
    """ASGI middleware. Requests that caption are counted as in flight and logged; the others are probes and pages,
    which are logged at debug level as long as they succeed.

    Exceptions end here, so that every reply has an id and uvicorn has nothing to log."""

    def __init__(self, app: ASGIApp, metrics: Metrics, handler: ProblemHandler) -> None:
        self._app = app
        self._metrics = metrics
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        identity = identify(scope)
        routed = _routed(scope)
        api = self._handler.apis.of(routed["method"], routed["path"])
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (_HEADER, identity.encode())]}
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
            # No status: cancelled at the end of the grace period.
            self._record(scope, api, 499 if status is None else status, time.perf_counter() - started, identity)

    def _record(self, scope: Scope, api: Api, status: int, seconds: float, identity: str) -> None:
        self._metrics.request_ended(api.label, status, seconds)
        level = logging.INFO if api.captions or status >= 400 else logging.DEBUG
        if _logger.isEnabledFor(level):
            # The path as it was sent: a decoded one may hold line breaks.
            path = scope.get("raw_path", b"").decode("ascii", "replace") or "/"
            fields = {
                "method": scope["method"],
                "path": path,
                "status": status,
                "ms": round(seconds * 1000, 1),
                "request_id": identity,
            }
            code = scope["state"].get("code")
            if code is not None:
                fields["code"] = code
            _logger.log(level, "request", extra={"fields": fields})


def _routed(scope: Scope) -> Scope:
    """As routes know it: HEAD is GET whose body the server leaves out, and a host may have the application under a
    prefix."""
    prefix = scope.get("root_path", "").rstrip("/")
    if not prefix and scope["method"] != "HEAD":
        return scope
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    path = scope["path"]
    if f"{path}/".startswith(f"{prefix}/"):  # and not one that only begins with the same letters
        path = path.removeprefix(prefix) or "/"
    return {**scope, "method": method, "path": path, "root_path": ""}
