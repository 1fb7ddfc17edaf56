"""Completes the OpenAPI document with what FastAPI cannot read off the routes: errors and shared headers.

The bodies of an API are described in its own `openapi.py`; the errors come from the exception tree.
"""

from typing import Any

from snapcap.service import errors
from snapcap.service.api.middleware.authentication import is_open
from snapcap.service.api.problems import PROBLEM, ErrorShape
from snapcap.service.api.routing import Apis
from snapcap.service.errors import ServiceError

Schema = dict[str, Any]
# As `responses=` of FastAPI takes them.
Responses = dict[int | str, dict[str, Any]]

# Of a body that is read under limits, and of a caption that is waited for.
BODY: tuple[type[ServiceError], ...] = (errors.BodyTimeout, errors.PayloadTooLarge, errors.UnsupportedMediaType)
CAPTION: tuple[type[ServiceError], ...] = (
    errors.UnknownOption,
    errors.InvalidOption,
    errors.MissingImage,
    errors.UnprocessableImage,
    errors.PromptTooLong,
    errors.Overloaded,
    errors.NotReady,
    errors.DeadlineExceeded,
)
JSON_BODY: tuple[type[ServiceError], ...] = (errors.EmptyBody, errors.InvalidJson)
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "schema": {"type": "string"},
    "description": "Kept for the reply and the log if it is 1 to 128 visible ASCII characters, else replaced.",
}
_KEY = "bearer"
_BINARY: Schema = {"type": "string", "format": "binary"}
# The image as the body itself, in the formats that are read.
IMAGE_BODIES: dict[str, Any] = {
    media_type: {"schema": _BINARY}
    for media_type in ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
}
IMAGE_TEXT: Schema = {
    "type": "string",
    "minLength": 1,
    "format": "byte",
    "contentEncoding": "base64",
    "description": "Base64, or a data URI with base64.",
}


def problems(*kinds: type[ServiceError], shape: ErrorShape = PROBLEM) -> Responses:
    """The responses of these errors, one for each status."""
    by_status: dict[int, list[type[ServiceError]]] = {}
    for kind in kinds:
        by_status.setdefault(kind.status, []).append(kind)
    return {status: _problem(status, of_status, shape) for status, of_status in sorted(by_status.items())}


def reply(description: str, *schemas: str, status: int = 200) -> Responses:
    """The response with a schema of the components, or with any of several."""
    refs = [ref(schema) for schema in schemas]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {status: {"description": description, "content": {"application/json": {"schema": schema}}}}


def ref(schema: str) -> Schema:
    """A schema of the components."""
    return {"$ref": f"#/components/schemas/{schema}"}


def nullable(schema: Schema) -> Schema:
    """The schema, or null, which is as good as leaving it out."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]}


def closed_object(required: list[str], properties: dict[str, Any]) -> Schema:
    """An object with these members and no others."""
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def path_parameter(name: str, description: str) -> dict[str, Any]:
    """A parameter in the path, for a route that reads it by itself."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": description,
    }


def complete(document: dict[str, Any], apis: Apis, keys: bool) -> None:
    """Adds to FastAPI's document what holds for every route: the header X-Request-Id, the errors that any request
    may end with, and their schemas. `keys`: clients must show one."""
    # Few processes are ever asked for the document.
    from snapcap.service.api.schemas_apis import definitions  # noqa: PLC0415

    components = document.setdefault("components", {})
    components["schemas"] = definitions()
    document["paths"]["/openapi.json"] = {"get": _this_document()}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete_operation(
                operation, apis.of(method.upper(), path).shape, keys and not is_open(method.upper(), path)
            )
    if keys:
        components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}


def _complete_operation(operation: dict[str, Any], shape: ErrorShape, key: bool) -> None:
    operation.setdefault("parameters", []).append(_REQUEST_ID)
    everywhere = problems(errors.EngineFailed, shape=shape)
    if key:
        operation["security"] = [{_KEY: []}]
        everywhere |= problems(errors.Unauthorized, shape=shape)
    responses = operation["responses"]
    responses |= {str(status): response for status, response in everywhere.items()}
    operation["responses"] = dict(sorted(responses.items()))
    for response in responses.values():
        header = {"schema": {"type": "string"}, "required": True}
        response.setdefault("headers", {})["X-Request-Id"] = header


def _problem(status: int, kinds: list[type[ServiceError]], shape: ErrorShape) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": ", ".join(kind.title for kind in kinds),
        "content": {shape.media_type: {"schema": ref(shape.schema)}},
    }
    if status in (429, 503):
        retry = {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds", "required": True}
        response["headers"] = {"Retry-After": retry}
    if status == 401:
        response["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}}
    return response


def _this_document() -> dict[str, Any]:
    found = {"description": "The document", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {
        "tags": ["documentation"],
        "summary": "This document",
        "operationId": "openapi",
        "responses": {"200": found},
    }
