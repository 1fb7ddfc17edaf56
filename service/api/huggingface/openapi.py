"""Describes the Hugging Face API in the OpenAPI document."""

from typing import Any

from snapcap.service import errors
from snapcap.service.api.huggingface.request import MAX_LENGTH, NESTED
from snapcap.service.api.openapi.schema_parts import (
    BODY,
    CAPTION,
    EXAMPLE_IMAGE,
    IMAGE_BODIES,
    IMAGE_TEXT,
    JSON_BODY,
    caption_reply,
    nullable,
    path_parameter,
    problems,
    request_object,
)
from snapcap.service.api.problems import HUGGING_FACE
from snapcap.service.captioning import options as caption_options

_ERRORS = (*JSON_BODY, *BODY, *CAPTION)


def _body() -> dict[str, Any]:
    parameters: dict[str, Any] = {name: nullable(option) for name, option in caption_options.schema().items()}
    parameters["max_new_tokens"]["description"] += " More than the model holds means as many as it holds."
    parameters["do_sample"] = {
        "type": ["boolean", "null"],
        "description": "false: greedy, whatever the temperature; true: the temperature is 1 unless it is given.",
    }
    parameters[MAX_LENGTH] = {
        **parameters["max_new_tokens"],
        "description": "As max_new_tokens, which wins, but with the token that a caption starts with.",
    }
    level = request_object([], parameters)
    nested = {
        name: {**nullable(level), "description": "They count as if they stood outside; none may stand in both."}
        for name in NESTED
    }
    members = {"inputs": IMAGE_TEXT, "parameters": nullable(request_object([], {**parameters, **nested}))}
    json_body = {"schema": request_object(["inputs"], members), "example": {"inputs": EXAMPLE_IMAGE}}
    content = {**IMAGE_BODIES, "application/json": json_body}
    return {"requestBody": {"required": True, "content": content}}


def operations() -> dict[str, dict[str, Any]]:
    """Returns FastAPI's keyword arguments for each route, by the name of the route."""
    found = caption_reply("The caption", "HuggingFaceCaptions")
    return {
        "image_to_text": {
            "summary": "Caption an image",
            "responses": found | problems(*_ERRORS, shape=HUGGING_FACE),
            "openapi_extra": _body(),
        },
        "image_to_text_of_model": {
            "summary": "Caption an image with a model",
            "responses": found | problems(*_ERRORS, errors.ModelNotFound, shape=HUGGING_FACE),
            "openapi_extra": {"parameters": [path_parameter("model", "The model's name.")], **_body()},
        },
    }
