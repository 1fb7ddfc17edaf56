"""Describes the replies of /v1/caption and /v1/captions."""

from typing import Literal

from pydantic import BaseModel, Field

from snapcap.service.api.openapi.base_schemas import Problem, one_of


class Timings(BaseModel):
    """Milliseconds."""

    queue: float = Field(description="waiting, for a decode thread and for the device")
    decode_image: float = Field(description="decoding and resizing the image")
    encode: float = Field(description="the encoder batch")
    decode: float = Field(description="all decode steps")
    total: float = Field(description="from the end of the body to the reply")


class Caption(BaseModel):
    caption: str = Field(description="The caption; it begins with the prompt.")
    model: str
    tokens: int = Field(ge=0, description="Tokens generated.")
    finish_reason: Literal["stop", "length"] = Field(
        description="stop: the model ended it; length: the limit of new tokens was reached."
    )
    backend: str
    timings: Timings


class CaptionItem(Caption):
    """The caption of one of several images."""

    index: int = Field(ge=0)
    filename: str


class ProblemItem(Problem):
    """Why one of several images has no caption."""

    index: int = Field(ge=0)
    filename: str


class Captions(BaseModel):
    captions: list[CaptionItem | ProblemItem] = Field(min_length=1, max_length=16, json_schema_extra=one_of)


ROOTS: tuple[type[BaseModel], ...] = (Caption, Captions)
