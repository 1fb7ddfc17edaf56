"""Describes the OpenAI API in the OpenAPI document."""

from typing import Any

from snapcap.service import errors
from snapcap.service.api.openai.request import LABELS, MAX_STOP_CHARACTERS, MAX_STOPS, NEUTRAL, OPTIONS
from snapcap.service.api.openapi import (
    BODY,
    CAPTION,
    JSON_BODY,
    closed_object,
    nullable,
    path_parameter,
    problems,
    reply,
)
from snapcap.service.api.problems import OPENAI
from snapcap.service.captioning import options as caption_options


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return closed_object(required, properties)


def _content(urls: bool) -> dict[str, Any]:
    url: dict[str, Any] = {"type": "string", "format": "data-uri", "description": "A data URI with base64."}
    if urls:
        remote = {"type": "string", "format": "uri", "description": "An http(s) URL of a host that is allowed."}
        url = {"anyOf": [url, remote]}
    image_url = _object(["url"], url=url, detail={"enum": ["auto", "low", "high", None]})
    image = _object(["type", "image_url"], type={"const": "image_url"}, image_url=image_url)
    text = _object(["type", "text"], type={"const": "text"}, text=caption_options.schema()["prompt"])
    # One of each at most, in either order.
    orders = [[image], [image, text], [text, image]]
    return {
        "oneOf": [
            {"type": "array", "prefixItems": order, "items": False, "minItems": len(order)} for order in orders
        ],
        "description": "One image, and optionally the text that the caption continues.",
    }


def _body(urls: bool) -> dict[str, Any]:
    message = _object(
        ["role", "content"], role={"const": "user"}, content=_content(urls), name={"type": ["string", "null"]}
    )
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
    options = caption_options.schema()
    switch = {"type": ["boolean", "null"]}
    usage = _object([], include_usage=switch, include_obfuscation=switch)
    request = _object(
        ["model", "messages"],
        model={"type": "string"},
        messages={"type": "array", "items": message, "minItems": 1, "maxItems": 1},
        stream={**switch, "default": False},
        stream_options={**nullable(usage), "description": "With stream only."},
        stop={"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}, {"type": "null"}]},
        **{field: nullable(options[name]) for field, name in OPTIONS.items()},
        **{
            field: {"enum": [*values, None], "description": "Nothing else is served."}
            for field, values in NEUTRAL.items()
        },
        **{field: {"description": "Read by nobody."} for field in LABELS},
    )
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": request}}}}


def _chat_reply() -> dict[int | str, dict[str, Any]]:
    whole = reply("The caption, or with stream its pieces as server-sent events", "ChatCompletion")
    whole[200]["content"]["text/event-stream"] = {
        "schema": {
            "type": "string",
            "description": "Events `data: CHUNK`, the last `data: [DONE]`. An error after the first is "
            "`data: ERROR`, and the last.",
        },
    }
    return whole


def chat(urls: bool) -> dict[str, Any]:
    """`urls`: images may be named by URLs, of some hosts."""
    refusals = problems(
        *JSON_BODY,
        *BODY,
        *CAPTION,
        errors.TooManyImages,
        errors.UnsupportedOption,
        errors.ModelNotFound,
        errors.ImageUrlRefused,
        errors.ImageNotFetched,
        shape=OPENAI,
    )
    return {
        "summary": "Caption the image of a message",
        "responses": _chat_reply() | refusals,
        "openapi_extra": _body(urls),
    }


MODELS: dict[str, Any] = {
    "summary": "The models",
    "responses": reply("The one model that is served", "ModelList") | problems(errors.NotReady, shape=OPENAI),
}
MODEL: dict[str, Any] = {
    "summary": "A model",
    "responses": reply("The model", "Model") | problems(errors.ModelNotFound, errors.NotReady, shape=OPENAI),
    "openapi_extra": {"parameters": [path_parameter("model", "The model's name.")]},
}
