"""Describes snapcap's own API and Hugging Face's in the OpenAPI document: in both a body may be an image."""

from typing import Any, Literal

from pydantic import BaseModel, Field, RootModel

from snapcap.models.processing.image_formats import MEDIA_TYPES
from snapcap.service import errors
from snapcap.service.api.caption import LONGEST_NAME, MAX_IMAGES, MODEL
from snapcap.service.api.huggingface import MAX_LENGTH, NESTED
from snapcap.service.api.schema_parts import (
    BINARY,
    BODY,
    CAPTION,
    EXAMPLE_IMAGE,
    IMAGE_TEXT,
    JSON_BODY,
    MODEL_NAME,
    URLS,
    ClosedReply,
    Operation,
    OptionalRegions,
    Problem,
    Schema,
    caption_reply,
    form_object,
    json_body,
    nullable,
    one_of,
    request_object,
    streamed_reply,
)
from snapcap.service.captioning import options as caption_options
from snapcap.service.errors import ServiceError
from snapcap.service.http.bodies import MULTIPART
from snapcap.service.http.replies import EventStream

_CAPTIONS_PROBLEMS: tuple[type[ServiceError], ...] = (
    *BODY,
    *(kind for kind in CAPTION if kind is not errors.UnprocessableImage),  # reported as an item of the reply
    errors.InvalidMultipart,
    errors.TooManyImages,
    errors.ModelNotFound,
)
_MODEL: Schema = {
    "type": "string",
    "maxLength": LONGEST_NAME,
    "description": "Name of the model; without it, the first.",
}
_CAPTION_PROBLEMS = (*JSON_BODY, errors.UnprocessableImage, *_CAPTIONS_PROBLEMS, *URLS)
_HUGGING_FACE_PROBLEMS = (*JSON_BODY, *BODY, *CAPTION, *URLS)
# The image as the body of the request, in each readable format.
_IMAGE_BODIES: dict[str, Any] = {
    media_type: {"schema": BINARY} for media_type in (*MEDIA_TYPES, "application/octet-stream")
}
_IMAGE_OR_URL: Schema = {
    **IMAGE_TEXT,
    "description": "Base64, a data URI with base64, or the http(s) URL of an image on an allowed host.",
}


def operations() -> dict[str, Operation]:
    """Returns the operation of each route by its name."""
    options = {MODEL: _MODEL, **caption_options.schema()}
    query = [
        {
            "name": name,
            "in": "query",
            "description": schema["description"],
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in options.items()
    ]
    members = {name: nullable(option) for name, option in options.items()}
    body = {
        **_IMAGE_BODIES,
        MULTIPART: {"schema": form_object(["image"], image=BINARY, **options)},
        **json_body(request_object(["image"], image=_IMAGE_OR_URL, **members), {"image": EXAMPLE_IMAGE}),
    }
    generated, parameters = caption_reply("The caption", "HuggingFaceCaptions"), _hugging_face_body()
    images = {"type": "array", "items": BINARY, "minItems": 1, "maxItems": MAX_IMAGES}
    return {
        "caption": Operation(
            "Caption an image",
            streamed_reply(
                "The caption, or its pieces as server-sent events",
                "Caption",
                EventStream,
                'Events `data: {"text": PIECE}`, then `data: CAPTION`. An error after the first event is sent as '
                "`data: PROBLEM` and ends the stream.",
            ),
            _CAPTION_PROBLEMS,
            body,
            query,
        ),
        "captions": Operation(
            f"Caption up to {MAX_IMAGES} images",
            caption_reply("A caption or a problem for each image", "Captions"),
            _CAPTIONS_PROBLEMS,
            {MULTIPART: {"schema": form_object(["images"], images=images, **options)}},
            query,
        ),
        "image_to_text": Operation("Caption an image", generated, _HUGGING_FACE_PROBLEMS, parameters),
        "image_to_text_of_model": Operation(
            "Caption an image with a model",
            generated,
            (*_HUGGING_FACE_PROBLEMS, errors.ModelNotFound),
            parameters,
            [MODEL_NAME],
        ),
    }


def _hugging_face_body() -> dict[str, Any]:
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
    schema = request_object(["inputs"], inputs=_IMAGE_OR_URL, parameters=whole)
    return {**_IMAGE_BODIES, **json_body(schema, {"inputs": EXAMPLE_IMAGE})}


class Timings(BaseModel):
    """Holds the durations of a request in milliseconds."""

    queue: float = Field(description="Waiting for a decode thread and for the device.")
    decode_image: float = Field(description="Decoding and resizing the image.")
    encode: float = Field(description="The encoder batch of the image.")
    decode: float = Field(description="All decode steps.")
    total: float = Field(description="From the end of the request body to the reply.")


class Caption(BaseModel):
    caption: str = Field(description="The caption; it begins with the prompt.")
    model: str
    tokens: int = Field(ge=0, description="Number of generated tokens.")
    finish_reason: Literal["stop", "length"] = Field(
        description="stop: the model ended the caption. length: the caption reached the limit of new tokens."
    )
    backend: str
    timings: Timings
    regions: OptionalRegions


class CaptionItem(Caption):
    """The caption of an image, in a reply for several images."""

    index: int = Field(ge=0)
    filename: str


class ProblemItem(Problem):
    """The reason for which an image has no caption, in a reply for several images."""

    index: int = Field(ge=0)
    filename: str


class Captions(BaseModel):
    captions: list[CaptionItem | ProblemItem] = Field(min_length=1, max_length=MAX_IMAGES, json_schema_extra=one_of)


class HuggingFaceCaption(ClosedReply):
    generated_text: str = Field(description="The caption; it begins with the prompt.")


class HuggingFaceCaptions(RootModel[list[HuggingFaceCaption]]):
    """A list with one item."""


ROOTS: tuple[type[BaseModel], ...] = (Caption, Captions, HuggingFaceCaptions)
