"""The OpenAPI document of the OpenAI API."""

from typing import Any

from service import caption_options, errors
from service.error_shapes import OPENAI
from service.openai_request import LABELS, MAX_STOPS, NEUTRAL, OPTIONS
from service.openapi import BODY, CAPTION, JSON_BODY, path_parameter, problems, reply


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _parts() -> dict[str, Any]:
    url = {
        "type": "string",
        "pattern": "^([dD][aA][tT][aA]:|[hH][tT][tT][pP][sS]?://)",
        "description": "A data URI with base64, or an http(s) URL of a host that the operator allows.",
    }
    image_url = _object(["url"], url=url, detail={"enum": ["auto", "low", "high", None]})
    image = _object(["type", "image_url"], type={"const": "image_url"}, image_url=image_url)
    text = _object(["type", "text"], type={"const": "text"}, text=caption_options.schema()["prompt"])
    kinds: dict[str, Any] = {"type": "array", "items": {"oneOf": [image, text]}, "minItems": 1, "maxItems": 2}
    has_image = {"properties": {"type": {"const": "image_url"}}, "required": ["type"]}
    return {**kinds, "contains": has_image, "minContains": 1, "maxContains": 1}


def _body() -> dict[str, Any]:
    message = _object(
        ["role", "content"],
        role={"const": "user"},
        content={**_parts(), "description": "One image, and optionally the text that the caption continues."},
        name={"type": "string"},
    )
    stop = {"type": "string", "minLength": 1, "maxLength": 1000}
    options = caption_options.schema()
    request = _object(
        ["model", "messages"],
        model={"type": "string"},
        messages={"type": "array", "items": message, "minItems": 1, "maxItems": 1},
        stream={"type": ["boolean", "null"], "default": False},
        stream_options={
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}},
            "description": "With stream only.",
        },
        stop={"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}, {"type": "null"}]},
        **{field: {**options[name], "type": [options[name]["type"], "null"]} for field, name in OPTIONS.items()},
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


CHAT: dict[str, Any] = {
    "summary": "Caption the image of a message",
    "responses": _chat_reply()
    | problems(
        *JSON_BODY,
        *BODY,
        *CAPTION,
        errors.TooManyImages,
        errors.UnsupportedOption,
        errors.ModelNotFound,
        errors.ImageUrlRefused,
        errors.ImageNotFetched,
        shape=OPENAI,
    ),
    "openapi_extra": _body(),
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
