"""Wraps every request: gives it an id, answers any exception, and counts, logs and traces it.

The id is the client's X-Request-Id if it is valid, and otherwise random.
"""

import logging
import random
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapcap.service.captioning.captioner import CaptionJob
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.engine.admission import Permit
from snapcap.service.errors import ClientDisconnected, EngineFailed, ServiceError
from snapcap.service.http.problems import as_service_error, forget_frames
from snapcap.service.http.routing import ROUTE, Dispatch
from snapcap.service.limits import REJECTED
from snapcap.service.memory import body_account
from snapcap.service.telemetry.logs import ACCESS
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.tracing import TRACE_ID_HEADER, TRACEPARENT, trace_id_of
from snapcap.warmup.option import parse_root_path

if TYPE_CHECKING:
    from snapcap.service.telemetry.otel import OtelSpan, OtelTracing

REQUEST_ID_HEADER = "X-Request-Id"
# A proxy names here the path prefix under which its clients reach the server.
PREFIX_HEADER = "X-Forwarded-Prefix"
_REQUEST_ID, _TRACE_ID, _PREFIX = (
    name.lower().encode() for name in (REQUEST_ID_HEADER, TRACE_ID_HEADER, PREFIX_HEADER)
)
_VISIBLE_ASCII = re.compile(rb"[\x21-\x7e]{1,128}")
# Seconds between two log lines of a probe that keeps getting 503.
SECONDS_BETWEEN_PROBES = 60.0
# Keys in the state of a request. "prefix": the path prefix set by the operator or the host application. "cut": the
# error that the connection has sent in place of the application's reply.
_CAPTIONS, _WHY, _SET_PREFIX, _CUT = "captions", "why", "prefix", "cut"
_logger = logging.getLogger(ACCESS)


def identify(scope: Scope) -> str:
    """Gives the request an id and returns the id. Notes the trace id of the `traceparent` header."""
    given: bytes | None = None
    parents: list[bytes] = []
    for name, value in scope["headers"]:
        if name == _REQUEST_ID:
            given = given or value
        elif name == TRACEPARENT:
            parents.append(value)
    state = scope.setdefault("state", {})
    if len(parents) == 1:  # several headers contradict each other, so none is used
        state["trace_id"] = trace_id_of(parents[0])
    # os.urandom is a system call that releases Python's lock, and would wait for the decode threads to get it back.
    usable = given is not None and _VISIBLE_ASCII.fullmatch(given)
    identity = given.decode("ascii") if given is not None and usable else f"{random.getrandbits(128):032x}"
    state["request_id"] = identity
    return identity


def request_id(scope: Scope) -> str:
    """Returns the id that `identify` gave the request."""
    value: str = scope["state"]["request_id"]
    return value


def trace_id(scope: Scope) -> str | None:
    """Returns the id of the trace that the request belongs to, 32 hexadecimal digits, or None without a trace."""
    value: str | None = scope["state"].get("trace_id")
    return value


class ProblemHandler:
    """Turns any exception into an error response in the shape of the request's API."""

    def __init__(self, metrics: Metrics, routes: Dispatch) -> None:
        self.metrics = metrics
        self.routes = routes

    async def __call__(self, request: Request, error: Exception) -> Response:
        """Notes the error and returns the error response."""
        failure = self.note(request, error)
        path = request.scope["path"]
        return self.routes.api_of(request.method, path).shape.response(failure, path, request_id(request.scope))

    def note(self, request: Request, error: Exception) -> ServiceError:
        """Counts the error, logs it if it is internal, and returns the error that the client may see."""
        failure = as_service_error(error)
        if isinstance(failure, ClientDisconnected):
            failure = request.scope["state"].get(_CUT, failure)
        self.metrics.count_rejection(failure)
        note_refusal(request.scope, failure)
        if isinstance(failure, EngineFailed):
            identity = request_id(request.scope)
            _logger.error("request failed", exc_info=error, extra={"fields": {"request_id": identity}})
        return failure


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
        self.tracing: OtelTracing | None = None  # set later: its module is imported after /livez answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        identity = identify(scope)
        routed = _routed(scope, self._root_path)
        api = self._handler.routes.api_of(routed["method"], routed["path"])
        span = begin_span(self.tracing, scope) if self.tracing is not None and api.captions else None
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (_REQUEST_ID, identity.encode())]
                if (trace := trace_id(scope)) is not None:
                    headers.append((_TRACE_ID, trace.encode()))
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
    scope["state"][_SET_PREFIX] = prefix
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    path = scope["path"]
    if f"{path}/".startswith(f"{prefix}/"):  # "/caption" does not have the prefix "/cap"
        path = path.removeprefix(prefix) or "/"
    return {**scope, "method": method, "path": path, "root_path": ""}


def prefix_of(scope: Scope) -> str:
    """Returns the path prefix under which the client reaches the server, such as "/cap", or "".

    The prefix is the configured one, or else the one in X-Forwarded-Prefix. Any client can send that header. The
    value is used only if it is a plain path, and a reply that contains it must not be cached for other clients."""
    noted: str = scope["state"].get(_SET_PREFIX, "")
    if noted:
        return noted
    given = [value for name, value in scope["headers"] if name == _PREFIX]
    try:
        return parse_root_path(given[0].decode("latin-1")) if len(given) == 1 else ""
    except ValueError:
        return ""


def new_caption(scope: Scope, permit: Permit, index: int | None = None) -> CaptionJob:
    """Returns one more caption of this request, whose times the log line includes. `index`: place of the image in a
    request of several; None: its only image."""
    identity = request_id(scope) if index is None else f"{request_id(scope)}/{index}"
    captions: list[CaptionTimes] = scope["state"].setdefault(_CAPTIONS, [])
    if index is not None or not captions:  # a request of one image may have waited for the model's first wake
        captions.append(CaptionTimes())
    return CaptionJob(identity, permit, captions[-1], body_account(scope))


def note_refusal(scope: Scope, error: ServiceError) -> None:
    """Notes why the request is refused, for its log line: the code of the error, and its option, reason or
    phase."""
    scope["state"][_WHY] = {"code": error.code, **error.extras}


def note_cut(state: dict[str, Any], error: ServiceError) -> None:
    """Notes in the state of a request that the server has cut the request off with an error. The application sees
    that its client is gone, and the log line and the metrics of the request then have this error."""
    state[_CUT] = error


def note_state(scope: Scope, state: str, phase: str) -> None:
    """Notes the state and the phase in the reply to a probe, for its log line."""
    scope["state"][_WHY] = {"state": state, "phase": phase}


class _Failing:
    """Holds the last 503 of a probe with a log line: the state in the reply, its moment, and the number of probes
    without a line since."""

    def __init__(self, state: object, at: float) -> None:
        self.state = state
        self.at = at
        self.left_out = 0


class RequestLog:
    """Logs one line for each request that captions or fails. Other requests, probes and pages, are logged as DEBUG.

    A probe that gets 503 is logged when the 503s begin, when the state in the reply changes, once a minute, and
    when they end: orchestrators probe every second or two."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: dict[str, _Failing] = {}  # by route, or by API for a path without a route

    def write(self, scope: Scope, api: str, status: int, began: float, ended: float, *, captions: bool) -> None:
        """Logs the line of a request. `began`, `ended`: moments of `time.monotonic`. `captions`: the API of the
        request captions."""
        level, left_out = self._level(scope, api, status, captions)
        if not _logger.isEnabledFor(level):
            return
        state = scope["state"]
        line: dict[str, object] = {
            "method": scope["method"],
            # The path as sent: a decoded path may contain line breaks.
            "path": scope.get("raw_path", b"").decode("ascii", "replace") or "/",
            "status": status,
            "ms": round((ended - began) * 1000, 1),
        }
        client = scope.get("client")
        if client is not None:
            line["client"] = client[0]
        if _WHY in state:
            line |= state[_WHY]
        if _CAPTIONS in state:
            _add_spent(line, state[_CAPTIONS], ended)
        line["request_id"] = request_id(scope)
        trace = trace_id(scope)
        if trace is not None:
            line["trace_id"] = trace
        if left_out is not None:
            line["left_out"] = left_out
        # `Logger.log` would search the stack for the caller, which costs as much time as all lines above.
        fields = {"fields": line}
        _logger.handle(_logger.makeRecord(ACCESS, level, "", 0, "request", (), None, extra=fields))

    def _level(self, scope: Scope, api: str, status: int, captions: bool) -> tuple[int, int | None]:
        """Returns the level of the line, and the number of lines left out before it, or None."""
        if scope["method"] in ("GET", "HEAD"):
            state = scope["state"]
            probed = state.get(ROUTE, api)  # an API has probes that answer 200 while another one answers 503
            if status == 503:
                return self._level_of_failing(probed, state.get(_WHY, {}).get("state"))
            if status < 400 and probed in self._failing:
                return logging.INFO, self._failing.pop(probed).left_out
        return logging.INFO if captions or status >= 400 else logging.DEBUG, None

    def _level_of_failing(self, probed: str, state: object) -> tuple[int, int | None]:
        now, before = self._clock(), self._failing.get(probed)
        if before is not None and before.state == state and now - before.at < SECONDS_BETWEEN_PROBES:
            before.left_out += 1
            return logging.DEBUG, None
        self._failing[probed] = _Failing(state, now)
        return logging.INFO, None if before is None else before.left_out


def _add_spent(line: dict[str, object], captions: list[CaptionTimes], ended: float) -> None:
    """Adds the tokens of all captions, the longest wait of one, and the longest wait for an absent model to a line.
    The wait is unknown for an image that could not be decoded, unless the request was given up while the image
    waited."""
    known = line.get("code") in REJECTED
    tokens, waited = 0, -1.0
    for each in captions:
        tokens += each.tokens
        if each.image_began or known:
            waited = max(waited, each.waited_s(ended))
    line["tokens"] = tokens
    if waited >= 0:
        line["queue_ms"] = round(waited * 1000, 1)
    if woke := max((each.wake_s for each in captions), default=0.0):
        line["wake_ms"] = round(woke * 1000, 1)


def begin_span(tracing: "OtelTracing", scope: Scope) -> "OtelSpan":
    """Begins and returns the span of a request. The request belongs to the trace of the span from now on."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if trace_id(scope) is None:  # no valid `traceparent`, or several
        headers.pop(TRACEPARENT.decode(), None)
    # No span has baggage, and OpenTelemetry's parser takes a time that grows with the square of spaces in it.
    headers.pop("baggage", None)
    span = tracing.begin(scope["method"], headers)
    scope["state"]["trace_id"] = span.trace_id
    return span


def end_span(span: "OtelSpan", scope: Scope, status: int) -> None:
    """Ends the span of a request, with its attributes and a child span for each phase of its captions."""
    now, route = time.monotonic(), scope["state"].get(ROUTE, "").replace(":path}", "}")
    captions: list[CaptionTimes] = scope["state"].get(_CAPTIONS, [])
    attributes: dict[str, str | int] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "snapcap.request_id": request_id(scope),
        "snapcap.tokens": sum(each.tokens for each in captions),
    }
    if route:
        attributes["http.route"] = route
    if (client := scope.get("client")) is not None:
        attributes["client.address"] = client[0]
    if (code := scope["state"].get(_WHY, {}).get("code")) is not None:
        attributes["error.type"] = code
    parts = [part for each in captions for part in each.spans(now)]
    span.end(f"{scope['method']} {route}".strip(), status, attributes, parts)
