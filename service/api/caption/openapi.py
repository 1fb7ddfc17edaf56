"""Describes the requests of /v1/caption and /v1/captions, with the options from the table that parses them."""

from typing import Any

from snapcap.service import errors
from snapcap.service.api.openapi import (
    BODY,
    CAPTION,
    IMAGE_BODIES,
    IMAGE_TEXT,
    JSON_BODY,
    Schema,
    closed_object,
    nullable,
)
from snapcap.service.captioning import options as caption_options
from snapcap.service.errors import ServiceError

CAPTIONS_PROBLEMS: tuple[type[ServiceError], ...] = (
    *BODY,
    *(kind for kind in CAPTION if kind is not errors.UnprocessableImage),  # it is an item of the reply
    errors.InvalidMultipart,
    errors.TooManyImages,
)
CAPTION_PROBLEMS = (*JSON_BODY, errors.UnprocessableImage, *CAPTIONS_PROBLEMS)
_BINARY: Schema = {"type": "string", "format": "binary"}


def caption_request() -> dict[str, Any]:
    """`openapi_extra=` of the route that takes one image."""
    options = caption_options.schema()
    members = {name: nullable(option) for name, option in options.items()}
    content = {
        **IMAGE_BODIES,
        "multipart/form-data": {"schema": closed_object(["image"], {"image": _BINARY, **options})},
        "application/json": {"schema": closed_object(["image"], {"image": IMAGE_TEXT, **members})},
    }
    return {"parameters": _parameters(options), "requestBody": {"required": True, "content": content}}


def captions_request() -> dict[str, Any]:
    """`openapi_extra=` of the route that takes several images."""
    options = caption_options.schema()
    images = {"type": "array", "items": _BINARY, "minItems": 1, "maxItems": 16}
    content = {"multipart/form-data": {"schema": closed_object(["images"], {"images": images, **options})}}
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
