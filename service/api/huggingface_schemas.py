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
    MODEL_NAME,
    URLS,
    ClosedReply,
    Operation,
    caption_reply,
    json_body,
    nullable,
    request_object,
)
from snapcap.service.captioning import options as caption_options

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
    return {**IMAGE_BODIES, **json_body(schema, {"inputs": EXAMPLE_IMAGE})}


def operations() -> dict[str, Operation]:
    """Returns the operation of each route by its name."""
    found, body = caption_reply("The caption", "HuggingFaceCaptions"), _body()
    return {
        "image_to_text": Operation("Caption an image", found, _ERRORS, body),
        "image_to_text_of_model": Operation(
            "Caption an image with a model", found, (*_ERRORS, errors.ModelNotFound), body, [MODEL_NAME]
        ),
    }


class HuggingFaceCaption(ClosedReply):
    generated_text: str = Field(description="The caption; it begins with the prompt.")


class HuggingFaceCaptions(RootModel[list[HuggingFaceCaption]]):
    """A list with one item."""


ROOTS: tuple[type[BaseModel], ...] = (HuggingFaceCaptions,)
