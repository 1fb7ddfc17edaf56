"""What surrounds every request: its id, the rendering of errors, the metrics and one log line."""

import logging
import os
import re
import time
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import EngineFailed
from service.metrics import Metrics
from service.problem import as_service_error, problem_response

_HEADER = "X-Request-Id"
_VISIBLE_ASCII = re.compile(rb"[\x21-\x7e]{1,128}")
_logger = logging.getLogger("snapcap.access")


def request_id(scope: Scope) -> str:
    """The id that RequestScope gave the request."""
    value: str = scope["state"]["request_id"]
    return value


class RequestScope:
    """The outermost ASGI application. `apis` maps a path to its label in metrics; `work` are the labels that
    caption, the others are probes, which are logged at debug level as long as they succeed."""

    def __init__(self, app: ASGIApp, metrics: Metrics, apis: Mapping[str, str], work: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._apis = apis
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = time.perf_counter()
        identity = _accepted_id(scope) or os.urandom(16).hex()
        scope.setdefault("state", {})["request_id"] = identity
        scope["app"] = self  # the router raises, instead of answering text/plain, when there is an app
        api = self._apis.get(scope["path"], "other")
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[_HEADER] = identity
            await send(message)

        if api in self._work:
            self._metrics.requests_in_flight.inc()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            problem = as_service_error(error, scope["method"], scope["path"])
            self._metrics.count_rejection(problem)
            if isinstance(problem, EngineFailed):
                _logger.error("request failed", exc_info=error, extra={"fields": {"request_id": identity}})
            if status is None:
                await problem_response(problem, scope["path"], identity)(scope, receive, send_with_id)
        finally:
            if api in self._work:
                self._metrics.requests_in_flight.dec()
            # No status: cancelled at the end of the grace period.
            self._record(scope, api, 499 if status is None else status, time.perf_counter() - started, identity)

    def _record(self, scope: Scope, api: str, status: int, seconds: float, identity: str) -> None:
        self._metrics.requests.labels(api, str(status)).inc()
        self._metrics.request_duration.labels(api).observe(seconds)
        level = logging.INFO if api in self._work or status >= 400 else logging.DEBUG
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
            _logger.log(level, "request", extra={"fields": fields})


def _accepted_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode("ascii") if _VISIBLE_ASCII.fullmatch(value) else None
    return None
