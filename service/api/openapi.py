"""Builds the OpenAPI document: FastAPI reads the routes, and the `…_schemas.py` of each API adds the rest."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from snapcap.service import errors
from snapcap.service.api import (
    caption_schemas,
    ollama_schemas,
    openai_schemas,
    operations_schemas,
    schema_parts,
    v2_schemas,
)
from snapcap.service.api.schema_parts import Operation, ref
from snapcap.service.config.settings import HttpSettings
from snapcap.service.errors import ServiceError
from snapcap.service.http.access import is_open
from snapcap.service.http.problems import ErrorShape
from snapcap.service.http.routing import Dispatch
from snapcap.warmup.version import snapcap_version

_SCHEMAS = (
    schema_parts,
    caption_schemas,
    ollama_schemas,
    openai_schemas,
    v2_schemas,
    operations_schemas,
)
_DESCRIPTION = (
    "Captions images. Every reply has the header X-Request-Id. A reply has the header X-Trace-Id if the request "
    "belongs to a trace, which a valid `traceparent` names. Errors are RFC 9457 problems. The APIs of OpenAI, "
    "Ollama, Hugging Face and the Open Inference Protocol have the error shapes that their clients expect."
)
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "schema": {"type": "string"},
    "description": "The id of the request, in the reply and in the log. The server replaces an id that is not 1 to "
    "128 visible ASCII characters.",
}
_TEXT_HEADER = {"schema": {"type": "string"}, "required": True}
_RETRY_AFTER = {
    "schema": {"type": "integer", "minimum": 1},
    "description": "Seconds to wait before the next try.",
    "required": True,
}
_HEADERS = {
    401: {"WWW-Authenticate": _TEXT_HEADER},
    429: {"Retry-After": _RETRY_AFTER},
    503: {"Retry-After": _RETRY_AFTER},
}
# The errors that any request may get.
_EVERYWHERE = (errors.OriginRefused, errors.QueryTooLong, errors.HostRefused, errors.EngineFailed)
_KEY = "bearer"


def openapi_document(routes: Dispatch, http: HttpSettings, keys: bool) -> dict[str, Any]:
    """Returns the OpenAPI document of these routes. `keys`: requests need an API key.

    Raises KeyError for a route that no `…_schemas.py` describes."""
    described = {
        **caption_schemas.operations(),
        **openai_schemas.operations(bool(http.image_hosts), http.chat_text == "continue"),
        **ollama_schemas.operations(),
        **v2_schemas.operations(),
        **operations_schemas.OPERATIONS,
    }
    app = FastAPI(
        title="snapcap",
        version=snapcap_version(),
        description=_DESCRIPTION,
        openapi_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    operations: dict[tuple[str, str], Operation] = {}
    for group in routes.groups:
        for route in group.routes:
            methods = sorted((route.methods or set()) - {"HEAD"})
            app.add_api_route(route.path, route.endpoint, methods=methods, name=route.name, tags=[group.tag])
            operations |= {(route.path_format, method): described[route.name] for method in methods}
    document = app.openapi()
    # FastAPI turns the bounds of numbers into floats, which are too coarse for seeds: schemas are added after that.
    for (path, method), each in operations.items():
        key = keys and not is_open(method, path)
        document["paths"][path][method.lower()] |= _operation(each, routes.api_of(method, path).shape, key)
    _, schemas = models_json_schema(
        [(model, "serialization") for module in _SCHEMAS for model in module.ROOTS],
        ref_template="#/components/schemas/{model}",
    )
    document["components"] = {"schemas": schemas["$defs"]}
    if keys:
        document["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return document


def _operation(described: Operation, shape: ErrorShape, key: bool) -> dict[str, Any]:
    """Returns the members of an operation that its route does not give. `shape`: of its errors. `key`: it needs an
    API key."""
    kinds = (*described.errors, *_EVERYWHERE, *((errors.Unauthorized,) if key else ()))
    replies = described.replies | _problems(kinds, shape)
    operation: dict[str, Any] = {
        "summary": described.summary,
        "parameters": [*described.parameters, _REQUEST_ID],
        "responses": {
            str(status): {**each, "headers": {**each.get("headers", {}), "X-Request-Id": _TEXT_HEADER}}
            for status, each in sorted(replies.items())
        },
    }
    if described.body is not None:
        operation["requestBody"] = {"required": True, "content": described.body}
    if key:
        operation["security"] = [{_KEY: []}]
    return operation


def _problems(kinds: Iterable[type[ServiceError]], shape: ErrorShape) -> schema_parts.Replies:
    """Returns the replies of these errors, one for each status."""
    titles: dict[int, list[str]] = {}
    for kind in kinds:
        titles.setdefault(kind.status, []).append(kind.title)
    content = {shape.media_type: {"schema": ref(shape.schema)}}
    return {
        status: {"description": ", ".join(named), "content": content, "headers": _HEADERS.get(status, {})}
        for status, named in titles.items()
    }
