"""The OpenAPI document, built from the table of options, the exception tree and the schemas."""

from importlib.metadata import version
from typing import Any

from service import caption_options, errors
from service.errors import ServiceError
from service.problem import MEDIA_TYPE
from service.schemas import Schema, components, reference

# What any route may answer.
_ANYWHERE: tuple[type[ServiceError], ...] = (errors.EngineFailed,)
_BODY: tuple[type[ServiceError], ...] = (
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
_CAPTION = (errors.EmptyBody, errors.InvalidJson, errors.UnprocessableImage, *_BODY)
_BINARY: Schema = {"type": "string", "format": "binary"}
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "schema": {"type": "string", "maxLength": 128},
    "description": "Taken over into the reply and the log if it is 1 to 128 visible ASCII characters.",
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "snapcap",
            "version": version("snapcap"),
            "description": "Captions images. Errors are RFC 9457 problems; X-Request-Id is in every reply.",
        },
        "paths": {
            "/v1/caption": {"post": _caption()},
            "/v1/captions": {"post": _captions()},
            "/livez": {"get": _get("livez", "Whether the process is alive", {"200": _json("It is", "Live")})},
            "/readyz": {"get": _get("readyz", "Whether captions are served", _readiness())},
            "/startup": {"get": _get("startup", "The start by phase", {"200": _json("The timeline", "Startup")})},
            "/metrics": {"get": _get("metrics", "Prometheus metrics", {"200": _metrics()})},
            "/openapi.json": {
                "get": _get("openapi", "This document", {"200": _reply("OpenAPI", {"type": "object"})})
            },
        },
        "components": {"schemas": components()},
    }


def _caption() -> dict[str, Any]:
    options = caption_options.schema()
    image = {"type": "string", "minLength": 1, "description": "Base64, or a data URI with base64."}
    members = {name: _or_null(option) for name, option in options.items()}
    json_body = {
        "type": "object",
        "properties": {"image": image, **members},
        "required": ["image"],
        "additionalProperties": False,
    }
    content = {
        "image/*": {"schema": _BINARY},
        "application/octet-stream": {"schema": _BINARY},
        "multipart/form-data": {"schema": _form("image", _BINARY, options)},
        "application/json": {"schema": json_body},
    }
    return {
        "operationId": "caption",
        "summary": "Caption an image",
        "description": "The image is the body, a part of a form, or base64 in JSON. Options in the body win over "
        "those in the query.",
        "parameters": _parameters(options),
        "requestBody": {"required": True, "content": content},
        "responses": {"200": _json("The caption", "Caption"), **_problems(_CAPTION)},
    }


def _captions() -> dict[str, Any]:
    options = caption_options.schema()
    images = {"type": "array", "items": _BINARY, "minItems": 1, "maxItems": 16}
    return {
        "operationId": "captions",
        "summary": "Caption up to 16 images",
        "description": "The file parts are named image or images; the options hold for all. The reply has, in "
        "order, a caption or a problem for each image. The request fails as a whole when it is itself bad, or "
        "when every image was refused with 429, 503 or 504.",
        "parameters": _parameters(options),
        "requestBody": {
            "required": True,
            "content": {"multipart/form-data": {"schema": _form("images", images, options)}},
        },
        "responses": {"200": _json("A caption or a problem for each image", "Captions"), **_problems(_BODY)},
    }


def _parameters(options: dict[str, Schema]) -> list[dict[str, Any]]:
    query = [
        {
            "name": name,
            "in": "query",
            "description": schema["description"],
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in options.items()
    ]
    return [*query, _REQUEST_ID]


def _form(part: str, schema: Schema, options: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": {part: schema, **options},
        "required": [part],
        "additionalProperties": False,
    }


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _get(operation: str, summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": [_REQUEST_ID],
        "responses": {**responses, **_problems(())},
    }


def _problems(kinds: tuple[type[ServiceError], ...]) -> dict[str, Any]:
    by_status: dict[int, list[type[ServiceError]]] = {}
    for kind in (*kinds, *_ANYWHERE):
        by_status.setdefault(kind.status, []).append(kind)
    return {str(status): _problem(of_status) for status, of_status in sorted(by_status.items())}


def _problem(kinds: list[type[ServiceError]]) -> dict[str, Any]:
    response = _reply(", ".join(kind.title for kind in kinds), reference("Problem"), MEDIA_TYPE)
    if kinds[0].status in (429, 503):
        retry = {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds", "required": True}
        response["headers"]["Retry-After"] = retry
    return response


def _json(description: str, schema: str) -> dict[str, Any]:
    return _reply(description, reference(schema))


def _readiness() -> dict[str, Any]:
    return {
        "200": _json("They are", "Ready"),
        "503": _json("Not yet, no longer, or the start failed", "Ready"),
    }


def _metrics() -> dict[str, Any]:
    response = _reply("The metrics", {"type": "string"}, "text/plain")
    response["content"]["application/openmetrics-text"] = {"schema": {"type": "string"}}
    return response


def _reply(description: str, schema: Schema, media_type: str = "application/json") -> dict[str, Any]:
    header = {"schema": {"type": "string"}, "required": True}
    return {
        "description": description,
        "headers": {"X-Request-Id": header},
        "content": {media_type: {"schema": schema}},
    }
