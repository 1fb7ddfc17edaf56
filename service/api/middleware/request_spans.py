"""Begins the trace span of a request, as a child of the span that its headers name, and ends it with attributes."""

import time

from starlette.types import Scope

from snapcap.service.api.middleware.request_id import request_id, trace_id
from snapcap.service.api.middleware.request_log import captions_of, code_of
from snapcap.service.api.routing import ROUTE
from snapcap.service.telemetry.tracing import RequestSpan, Tracing

_TRACEPARENT = "traceparent"


def begin_span(tracing: Tracing, scope: Scope) -> RequestSpan:
    """Begins and returns the span of a request. The request belongs to the trace of the span from now on."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if trace_id(scope) is None:  # no valid `traceparent`, or several
        headers.pop(_TRACEPARENT, None)
    span = tracing.begin(scope["method"], headers)
    scope["state"]["trace_id"] = span.trace_id
    return span


def end_span(span: RequestSpan, scope: Scope, status: int) -> None:
    """Ends the span of a request, with its attributes and a child span for each phase of its captions."""
    now, route = time.monotonic(), scope["state"].get(ROUTE, "").replace(":path}", "}")
    captions = captions_of(scope)
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
    if (code := code_of(scope)) is not None:
        attributes["error.type"] = code
    parts = [part for each in captions for part in each.spans(now)]
    span.end(f"{scope['method']} {route}".strip(), status, attributes, parts)
