"""Describes /v1/caption and /v1/captions in the OpenAPI document. The options come from the parser's table."""

from typing import Any

from snapcap.service import errors
from snapcap.service.api.openapi.schema_parts import (
    BODY,
    CAPTION,
    EXAMPLE_IMAGE,
    IMAGE_BODIES,
    IMAGE_TEXT,
    JSON_BODY,
    Schema,
    caption_reply,
    form_object,
    nullable,
    problems,
    request_object,
)
from snapcap.service.captioning import options as caption_options
from snapcap.service.errors import ServiceError

_CAPTIONS_PROBLEMS: tuple[type[ServiceError], ...] = (
    *BODY,
    *(kind for kind in CAPTION if kind is not errors.UnprocessableImage),  # reported as an item of the reply
    errors.InvalidMultipart,
    errors.TooManyImages,
)
_CAPTION_PROBLEMS = (*JSON_BODY, errors.UnprocessableImage, *_CAPTIONS_PROBLEMS)
_BINARY: Schema = {"type": "string", "format": "binary"}


def operations() -> dict[str, dict[str, Any]]:
    """Returns FastAPI's keyword arguments for each route, by the name of the route."""
    return {
        "caption": {
            "summary": "Caption an image",
            "responses": caption_reply("The caption", "Caption") | problems(*_CAPTION_PROBLEMS),
            "openapi_extra": _caption_request(),
        },
        "captions": {
            "summary": "Caption up to 16 images",
            "responses": caption_reply("A caption or a problem for each image", "Captions")
            | problems(*_CAPTIONS_PROBLEMS),
            "openapi_extra": _captions_request(),
        },
    }


def _caption_request() -> dict[str, Any]:
    options = caption_options.schema()
    members = {name: nullable(option) for name, option in options.items()}
    content = {
        **IMAGE_BODIES,
        "multipart/form-data": {"schema": form_object(["image"], {"image": _BINARY, **options})},
        "application/json": {
            "schema": request_object(["image"], {"image": IMAGE_TEXT, **members}),
            "example": {"image": EXAMPLE_IMAGE},
        },
    }
    return {"parameters": _parameters(options), "requestBody": {"required": True, "content": content}}


def _captions_request() -> dict[str, Any]:
    options = caption_options.schema()
    images = {"type": "array", "items": _BINARY, "minItems": 1, "maxItems": 16}
    content = {"multipart/form-data": {"schema": form_object(["images"], {"images": images, **options})}}
    return {"parameters": _parameters(options), "requestBody": {"required": True, "content": content}}


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
