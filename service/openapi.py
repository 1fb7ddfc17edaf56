"""What FastAPI cannot read off the routes: bodies in three forms, options, problems, and what holds everywhere.

The options come from the table that parses them, the problems from the exception tree.
"""

from typing import Any

from service import caption_options, errors
from service.errors import ServiceError
from service.problem import MEDIA_TYPE

Schema = dict[str, Any]
# As `responses=` of FastAPI takes them.
Responses = dict[int | str, dict[str, Any]]

_FORM: tuple[type[ServiceError], ...] = (
    errors.InvalidMultipart,
    errors.BodyTimeout,
    errors.PayloadTooLarge,
    errors.UnsupportedMediaType,
    errors.UnknownOption,
    errors.InvalidOption,
    errors.MissingImage,
    errors.TooManyImages,
    errors.PromptTooLong,
    errors.Overloaded,
    errors.NotReady,
    errors.DeadlineExceeded,
)
CAPTIONS_PROBLEMS = _FORM
CAPTION_PROBLEMS = (errors.EmptyBody, errors.InvalidJson, errors.UnprocessableImage, *_FORM)
_BINARY: Schema = {"type": "string", "format": "binary"}
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "schema": {"type": "string", "maxLength": 128},
    "description": "Taken over into the reply and the log if it is 1 to 128 visible ASCII characters.",
}


def caption_request() -> dict[str, Any]:
    """`openapi_extra=` of the route that takes one image."""
    options = caption_options.schema()
    image = {"type": "string", "minLength": 1, "description": "Base64, or a data URI with base64."}
    members = {name: {**option, "type": [option["type"], "null"]} for name, option in options.items()}
    content = {
        "image/*": {"schema": _BINARY},
        "application/octet-stream": {"schema": _BINARY},
        "multipart/form-data": {"schema": _object("image", _BINARY, options)},
        "application/json": {"schema": _object("image", image, members)},
    }
    return {"parameters": _parameters(options), "requestBody": {"required": True, "content": content}}


def captions_request() -> dict[str, Any]:
    """`openapi_extra=` of the route that takes several images."""
    options = caption_options.schema()
    images = {"type": "array", "items": _BINARY, "minItems": 1, "maxItems": 16}
    content = {"multipart/form-data": {"schema": _object("images", images, options)}}
    return {"parameters": _parameters(options), "requestBody": {"required": True, "content": content}}


def problems(*kinds: type[ServiceError]) -> Responses:
    """The responses of these errors, one for each status."""
    by_status: dict[int, list[type[ServiceError]]] = {}
    for kind in kinds:
        by_status.setdefault(kind.status, []).append(kind)
    return {status: _problem(status, of_status) for status, of_status in sorted(by_status.items())}


def complete(document: dict[str, Any]) -> None:
    """Adds to FastAPI's document what holds for every route: the header X-Request-Id and the schema of problems."""
    from service.schemas import Problem  # noqa: PLC0415 - few processes are ever asked for the document

    document["components"]["schemas"]["Problem"] = Problem.model_json_schema(mode="serialization")
    document["paths"]["/openapi.json"] = {"get": _this_document()}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.setdefault("parameters", []).append(_REQUEST_ID)
            for response in operation["responses"].values():
                header = {"schema": {"type": "string"}, "required": True}
                response.setdefault("headers", {})["X-Request-Id"] = header


def _object(part: str, schema: Schema, options: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": {part: schema, **options},
        "required": [part],
        "additionalProperties": False,
    }


def _parameters(options: dict[str, Schema]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "description": schema["description"],
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in options.items()
    ]


def _problem(status: int, kinds: list[type[ServiceError]]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": ", ".join(kind.title for kind in kinds),
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if status in (429, 503):
        retry = {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds", "required": True}
        response["headers"] = {"Retry-After": retry}
    return response


def _this_document() -> dict[str, Any]:
    found = {"description": "The document", "content": {"application/json": {"schema": {"type": "object"}}}}
    responses = {"200": found, **{str(status): reply for status, reply in problems(errors.EngineFailed).items()}}
    return {
        "tags": ["documentation"],
        "summary": "This document",
        "operationId": "openapi",
        "responses": responses,
    }
