"""Describes the probes, /startup, /metrics, the pages and the OpenAPI document in that document."""

from typing import Any

from starlette.responses import HTMLResponse, PlainTextResponse

from snapcap.service.api.openapi.schema_parts import Responses, problems, reply
from snapcap.service.errors import InvalidOption

_FORMAT = {
    "name": "format",
    "in": "query",
    "description": "json: as described here. trace: a Chrome trace, which ui.perfetto.dev opens.",
    "schema": {"type": "string", "enum": ["json", "trace"], "default": "json"},
}
_PAGE: dict[str, Any] = {
    "response_class": HTMLResponse,
    "responses": {304: {"description": "It is the one in If-None-Match"}},
}


def _ready() -> Responses:
    return reply("They are", "Ready") | reply("Not yet, no longer, or the start failed", "Ready", status=503)


def operations() -> dict[str, dict[str, Any]]:
    """Returns FastAPI's keyword arguments for each route, by the name of the route."""
    return {
        "livez": {"summary": "Whether the process is alive", "responses": reply("It is", "Live")},
        "readyz": {"summary": "Whether captions are served", "responses": _ready()},
        "health": {"summary": "As /readyz, where other servers have it", "responses": _ready()},
        "startup": {
            "summary": "The start by phase",
            "responses": reply("The timeline", "Startup", "Trace") | problems(InvalidOption),
            "openapi_extra": {"parameters": [_FORMAT]},
        },
        "metrics": {
            "summary": "Prometheus metrics",
            "response_description": "The metrics",
            "response_class": PlainTextResponse,
            "responses": {200: {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}},
        },
        "page": {
            "summary": "The page",
            "response_description": "A page to caption images on, and to watch the start",
            **_PAGE,
        },
        "docs": {
            "summary": "The OpenAPI document as a page",
            "response_description": "The reference",
            **_PAGE,
        },
        "openapi": {
            "summary": "This document",
            "responses": {
                200: {
                    "description": "The document",
                    "content": {"application/json": {"schema": {"type": "object"}}},
                }
            },
        },
    }
