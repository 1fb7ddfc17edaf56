"""Describes /v1/caption and /v1/captions in the OpenAPI document. The options come from the parser's table."""

from typing import Literal

from pydantic import BaseModel, Field

from snapcap.service import errors
from snapcap.service.api.caption import LONGEST_NAME, MAX_IMAGES, MODEL
from snapcap.service.api.schema_parts import (
    BINARY,
    BODY,
    CAPTION,
    EXAMPLE_IMAGE,
    IMAGE_BODIES,
    IMAGE_OR_URL,
    JSON_BODY,
    URLS,
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
        **IMAGE_BODIES,
        MULTIPART: {"schema": form_object(["image"], image=BINARY, **options)},
        **json_body(request_object(["image"], image=IMAGE_OR_URL, **members), {"image": EXAMPLE_IMAGE}),
    }
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
    }


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


ROOTS: tuple[type[BaseModel], ...] = (Caption, Captions)
