"""Describes the Hugging Face API in the OpenAPI document."""

from typing import Any

from pydantic import BaseModel, Field, RootModel

from snapcap.service import errors
from snapcap.service.api.huggingface import MAX_LENGTH, NESTED
from snapcap.service.api.schema_parts import (
    BODY,
    CAPTION,
    EXAMPLE_IMAGE,
    IMAGE_BODIES,
    IMAGE_OR_URL,
    JSON_BODY,
    URLS,
    ClosedReply,
    caption_reply,
    nullable,
    path_parameter,
    problems,
    request_object,
)
from snapcap.service.captioning import options as caption_options
from snapcap.service.http.problems import SENTENCE

_ERRORS = (*JSON_BODY, *BODY, *CAPTION, *URLS)


def _body() -> dict[str, Any]:
    parameters: dict[str, Any] = {name: nullable(option) for name, option in caption_options.schema().items()}
    parameters["max_new_tokens"]["description"] += " A value above the model's maximum means the maximum."
    parameters["do_sample"] = {
        "type": ["boolean", "null"],
        "description": "false: greedy decoding, whatever the temperature. true: sampling, with temperature 1 "
        "unless the request has another.",
    }
    parameters[MAX_LENGTH] = {
        **parameters["max_new_tokens"],
        "description": "Same as `max_new_tokens`, which overrides it, but counts the caption's start token too.",
    }
    level = request_object([], **parameters)
    nested = {
        name: {
            **nullable(level),
            "description": "Parameters of generation, with the same effect as outside of this member. A parameter "
            "must not have different values inside and outside.",
        }
        for name in NESTED
    }
    whole = nullable(request_object([], **parameters, **nested))
    schema = request_object(["inputs"], inputs=IMAGE_OR_URL, parameters=whole)
    json_body = {"schema": schema, "example": {"inputs": EXAMPLE_IMAGE}}
    content = {**IMAGE_BODIES, "application/json": json_body}
    return {"requestBody": {"required": True, "content": content}}


def operations() -> dict[str, dict[str, Any]]:
    """Returns FastAPI's keyword arguments for each route, by the name of the route."""
    found = caption_reply("The caption", "HuggingFaceCaptions")
    return {
        "image_to_text": {
            "summary": "Caption an image",
            "responses": found | problems(*_ERRORS, shape=SENTENCE),
            "openapi_extra": _body(),
        },
        "image_to_text_of_model": {
            "summary": "Caption an image with a model",
            "responses": found | problems(*_ERRORS, errors.ModelNotFound, shape=SENTENCE),
            "openapi_extra": {"parameters": [path_parameter("model", "The model's name.")], **_body()},
        },
    }


class HuggingFaceCaption(ClosedReply):
    generated_text: str = Field(description="The caption; it begins with the prompt.")


class HuggingFaceCaptions(RootModel[list[HuggingFaceCaption]]):
    """A list with one item."""


ROOTS: tuple[type[BaseModel], ...] = (HuggingFaceCaptions,)
