"""Describes the replies of the OpenAI API."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from snapcap.service.api.caption.schemas import Timings
from snapcap.service.api.openapi.base_schemas import ClosedReply, OptionalText, without_default

# The type of a member that may be absent but is never null.
_OptionalTimings = Annotated[Timings | SkipJsonSchema[None], Field(default=None, json_schema_extra=without_default)]


class ErrorMembers(ClosedReply):
    message: str = Field(description="A sentence that says what to do.")
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The field that is wrong.")
    code: str


class OpenAIError(ClosedReply):
    error: ErrorMembers


class Model(ClosedReply):
    id: str
    object: Literal["model"]
    created: int = Field(description="Since when it is served, in seconds of Unix time.")
    owned_by: str


class ModelList(ClosedReply):
    object: Literal["list"]
    data: list[Model]


class Usage(ClosedReply):
    """An image counts as no token."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class ChatMessage(ClosedReply):
    role: Literal["assistant"]
    content: str = Field(description="What follows the text of the request in the caption.")
    refusal: None


class ChatChoice(ClosedReply):
    index: Literal[0]
    message: ChatMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(ClosedReply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice] = Field(min_length=1, max_length=1)
    usage: Usage


class ChatDelta(ClosedReply):
    role: Literal["assistant"] = Field(default="assistant", description="in the first chunk")
    content: str = ""


class ChatChunkChoice(ClosedReply):
    index: Literal[0]
    delta: ChatDelta
    logprobs: None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(ClosedReply):
    """The data of one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice] = Field(max_length=1, description="Empty in the chunk of the usage.")
    usage: Usage | None = Field(default=None, description="in the last chunk, with stream_options.include_usage")
    backend: OptionalText = Field(description="beside the usage: what ran it; not where a stop sequence ended it")
    timings: _OptionalTimings = Field(description="as in a reply of /v1/caption, where the backend is")


ROOTS: tuple[type[BaseModel], ...] = (OpenAIError, ModelList, ChatCompletion, ChatCompletionChunk)
