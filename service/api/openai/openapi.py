"""Describes the OpenAI API in the OpenAPI document."""

from typing import Any

from snapcap.service import errors
from snapcap.service.api.openai.messages import IMAGES, OTHER_ROLES, TEXTS, USER
from snapcap.service.api.openai.request import LABELS, MAX_STOP_CHARACTERS, MAX_STOPS, OPTIONS
from snapcap.service.api.openapi.schema_parts import (
    BODY,
    CAPTION,
    EXAMPLE_IMAGE,
    EXAMPLE_MODEL,
    JSON_BODY,
    caption_reply,
    nullable,
    path_parameter,
    problems,
    reply,
    request_object,
)
from snapcap.service.api.problems import OPENAI
from snapcap.service.captioning import options as caption_options
from snapcap.service.captioning.options import EMPTY, NEUTRAL


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return request_object(required, properties)


def _image(urls: bool) -> dict[str, Any]:
    url: dict[str, Any] = {"type": "string", "format": "data-uri", "description": "A data URI with base64."}
    if urls:
        remote = {"type": "string", "format": "uri", "description": "An http(s) URL of a host that is allowed."}
        url = {"anyOf": [url, remote]}
    # OpenAI's form is an object with the URL; some clients send the URL alone.
    either = {"anyOf": [_object(["url"], url=url), url]}
    return _object(["type", "image_url"], type={"enum": [*IMAGES]}, image_url=either)


def _user(content: dict[str, Any]) -> dict[str, Any]:
    return _object(["role", "content"], role={"const": USER}, content=content, images={"enum": [None, []]})


def _text(schema: dict[str, Any]) -> dict[str, Any]:
    return _object(["type", "text"], type={"enum": [*TEXTS]}, text=schema, image_url={"type": "null"})


def _one_message(urls: bool) -> dict[str, Any]:
    """Returns the schema of messages whose text is continued."""
    image, text = _image(urls), _text(caption_options.schema()["prompt"])
    # The content has one image and at most one text, in either order.
    orders = [[image], [image, text], [text, image]]
    content = {
        "oneOf": [
            {"type": "array", "prefixItems": order, "items": False, "minItems": len(order)} for order in orders
        ],
        "description": "One image, and optionally the text that the caption continues.",
    }
    return {"type": "array", "items": _user(content), "minItems": 1, "maxItems": 1}


def _conversation(urls: bool) -> dict[str, Any]:
    """Returns the schema of messages whose text is ignored. The newest image of the messages counts."""
    image = _image(urls)
    parts = {"type": "array", "items": {"anyOf": [image, _text({"type": "string"})]}}
    user = _user({"anyOf": [{"type": "string"}, parts]})
    other = _object(
        ["role"],
        role={"enum": [*OTHER_ROLES]},
        content={"anyOf": [{"type": ["string", "null"]}, parts]},
        images={"enum": [None, []]},
    )
    return {
        "type": "array",
        "items": {"anyOf": [user, {**other, "description": "Ignored, but for images."}]},
        "contains": _user({**parts, "contains": image, "maxContains": 1}),
        "description": "The newest image of the messages is captioned; text and the rest are ignored.",
    }


def _body(urls: bool, continue_text: bool) -> dict[str, Any]:
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
    options = caption_options.schema()
    switch = {"type": ["boolean", "null"]}
    usage = _object([], include_usage=switch, include_obfuscation=switch)
    request = _object(
        ["messages"],
        model={
            "type": ["string", "null"],
            "description": "The one that is served; so is `dummy`.",
        },
        messages=_one_message(urls) if continue_text else _conversation(urls),
        stream={**switch, "default": False},
        stream_options={**nullable(usage), "description": "With stream only."},
        stop={"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}, {"type": "null"}]},
        **{field: nullable(options[name]) for field, name in OPTIONS.items()},
        **{
            field: {"enum": [*values, *EMPTY, None], "description": "Nothing else is served."}
            for field, values in NEUTRAL.items()
            if field not in (*OPTIONS, "stop")
        },
        **{field: {"description": "Read by nobody."} for field in LABELS},
    )
    url = {"url": f"data:image/png;base64,{EXAMPLE_IMAGE}"}
    message = {"role": USER, "content": [{"type": "image_url", "image_url": url}]}
    content = {"schema": request, "example": {"model": EXAMPLE_MODEL, "messages": [message]}}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def _chat_reply() -> dict[int | str, dict[str, Any]]:
    whole = caption_reply("The caption, or with stream its pieces as server-sent events", "ChatCompletion")
    whole[200]["content"]["text/event-stream"] = {
        "schema": {
            "type": "string",
            "description": "Events `data: CHUNK`, the last `data: [DONE]`. An error after the first is "
            "`data: ERROR`, and the last.",
        },
    }
    return whole


def _chat(urls: bool, continue_text: bool) -> dict[str, Any]:
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
        "openapi_extra": _body(urls, continue_text),
    }


def operations(urls: bool, continue_text: bool) -> dict[str, dict[str, Any]]:
    """Returns FastAPI's keyword arguments for each route, by the name of the route. `urls`: http(s) URLs of images
    are allowed for some hosts. `continue_text`: the text of a message is the beginning of the caption."""
    return {
        "create_chat_completion": _chat(urls, continue_text),
        "list_models": {
            "summary": "The models",
            "responses": reply("The one model that is served", "ModelList")
            | problems(errors.NotReady, shape=OPENAI),
        },
        "retrieve_model": {
            "summary": "A model",
            "responses": reply("The model", "Model")
            | problems(errors.ModelNotFound, errors.NotReady, shape=OPENAI),
            "openapi_extra": {"parameters": [path_parameter("model", "The model's name.")]},
        },
    }
