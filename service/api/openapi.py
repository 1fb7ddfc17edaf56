"""Builds the OpenAPI document: FastAPI reads the routes, and the `…_schemas.py` of each API adds the rest."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from snapcap.service import errors
from snapcap.service.api import (
    caption_schemas,
    huggingface_schemas,
    ollama_schemas,
    openai_schemas,
    operations_schemas,
    schema_parts,
    v2_schemas,
)
from snapcap.service.api.schema_parts import problems
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.access import is_open
from snapcap.service.http.problems import ErrorShape
from snapcap.service.http.routing import Dispatch
from snapcap.warmup.version import snapcap_version

_SCHEMAS = (
    schema_parts,
    caption_schemas,
    huggingface_schemas,
    ollama_schemas,
    openai_schemas,
    v2_schemas,
    operations_schemas,
)
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "schema": {"type": "string"},
    "description": "The id of the request, in the reply and in the log. The server replaces an id that is not 1 to "
    "128 visible ASCII characters.",
}
_KEY = "bearer"


def openapi_document(routes: Dispatch, http: HttpSettings, keys: bool) -> dict[str, Any]:
    """Returns the OpenAPI document of these routes. `keys`: requests need an API key.

    Raises KeyError for a route that no `…_schemas.py` describes."""
    app = FastAPI(
        title="snapcap",
        version=snapcap_version(),
        description="Captions images. Every reply has the header X-Request-Id. A reply has the header X-Trace-Id "
        "if the request belongs to a trace, which a valid `traceparent` names. Errors are RFC 9457 problems. The "
        "APIs of OpenAI, Ollama, Hugging Face and the Open Inference Protocol have the error shapes that their "
        "clients expect.",
        openapi_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    described = {
        **caption_schemas.operations(),
        **huggingface_schemas.operations(),
        **openai_schemas.operations(bool(http.image_hosts), http.chat_text == "continue"),
        **ollama_schemas.operations(),
        **v2_schemas.operations(),
        **operations_schemas.operations(),
    }
    for group in routes.groups:
        for route in group.routes:
            methods = sorted((route.methods or set()) - {"HEAD"})
            keywords = described[route.name]
            app.add_api_route(
                route.path, route.endpoint, methods=methods, name=route.name, tags=[group.tag], **keywords
            )
    document = app.openapi()
    _, schemas = models_json_schema(
        [(model, "serialization") for module in _SCHEMAS for model in module.ROOTS],
        ref_template="#/components/schemas/{model}",
    )
    components = document.setdefault("components", {})
    components["schemas"] = schemas["$defs"]
    for path, by_method in document["paths"].items():
        for method, operation in by_method.items():
            key = keys and not is_open(method.upper(), path)
            _complete(operation, routes.api_of(method.upper(), path).shape, key)
    if keys:
        components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return document


def _complete(operation: dict[str, Any], shape: ErrorShape, key: bool) -> None:
    """Adds the parts that all operations share: the header X-Request-Id, and the errors of any request."""
    operation.setdefault("parameters", []).append(_REQUEST_ID)
    everywhere = problems(
        errors.OriginRefused, errors.QueryTooLong, errors.HostRefused, errors.EngineFailed, shape=shape
    )
    if key:
        operation["security"] = [{_KEY: []}]
        everywhere |= problems(errors.Unauthorized, shape=shape)
    responses = operation["responses"]
    responses |= {str(status): response for status, response in everywhere.items()}
    operation["responses"] = dict(sorted(responses.items()))
    for response in responses.values():
        header = {"schema": {"type": "string"}, "required": True}
        response.setdefault("headers", {})["X-Request-Id"] = header
