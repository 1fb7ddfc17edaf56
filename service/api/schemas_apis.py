"""Defines the replies of the Hugging Face, OpenAI and v2 APIs as models, and collects the schemas of all APIs."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel
from pydantic.json_schema import models_json_schema

from snapcap.service.api.schemas import Caption, Captions, Live, Problem, Ready, Startup, Trace


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class HuggingFaceCaption(_Reply):
    generated_text: str = Field(description="The caption; it begins with the prompt.")


class HuggingFaceCaptions(RootModel[list[HuggingFaceCaption]]):
    """A list of one."""


class HuggingFaceError(_Reply):
    error: str = Field(description="A sentence that says what to do.")


class ErrorMembers(_Reply):
    message: str = Field(description="A sentence that says what to do.")
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The field that is wrong.")
    code: str


class OpenAIError(_Reply):
    error: ErrorMembers


class Model(_Reply):
    id: str
    object: Literal["model"]
    created: int = Field(description="Since when it is served, in seconds of Unix time.")
    owned_by: str


class ModelList(_Reply):
    object: Literal["list"]
    data: list[Model]


class Usage(_Reply):
    """An image counts as no token."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class ChatMessage(_Reply):
    role: Literal["assistant"]
    content: str = Field(description="What follows the text of the request in the caption.")
    refusal: None


class ChatChoice(_Reply):
    index: Literal[0]
    message: ChatMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(_Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice] = Field(min_length=1, max_length=1)
    usage: Usage


class ChatDelta(_Reply):
    role: Literal["assistant"] = Field(default="assistant", description="in the first chunk")
    content: str = ""


class ChatChunkChoice(_Reply):
    index: Literal[0]
    delta: ChatDelta
    logprobs: None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(_Reply):
    """The data of one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice] = Field(max_length=1, description="Empty in the chunk of the usage.")
    usage: Usage | None = Field(default=None, description="in the last chunk, with stream_options.include_usage")


class V2Live(_Reply):
    live: Literal[True]


class V2Ready(_Reply):
    ready: bool


class V2Server(_Reply):
    name: Literal["snapcap"]
    version: str
    extensions: list[str]


class V2ModelReady(_Reply):
    name: str
    ready: Literal[True]


class V2TensorMetadata(_Reply):
    name: str
    datatype: Literal["BYTES"]
    shape: list[int]


class V2Model(_Reply):
    name: str
    versions: list[str]
    platform: str
    inputs: list[V2TensorMetadata]
    outputs: list[V2TensorMetadata]


class V2OutputParameters(_Reply):
    binary_data_size: int = Field(ge=0)


class V2Output(_Reply):
    name: Literal["caption"]
    datatype: Literal["BYTES"]
    shape: list[int]
    data: list[str] = Field(default=[], description="The captions, unless they follow as binary tensor data.")
    parameters: V2OutputParameters | None = None


class V2Captions(_Reply):
    model_name: str
    model_version: Literal["1"]
    outputs: list[V2Output] = Field(min_length=1, max_length=1)
    id: str = Field(default="", description="that of the request, if it had one")


class V2Error(_Reply):
    error: str = Field(description="A sentence that says what to do.")


_ROOTS: tuple[type[BaseModel], ...] = (
    Caption,
    Captions,
    Live,
    Problem,
    Ready,
    Startup,
    Trace,
    HuggingFaceCaptions,
    HuggingFaceError,
    OpenAIError,
    ModelList,
    ChatCompletion,
    ChatCompletionChunk,
    V2Live,
    V2Ready,
    V2Server,
    V2ModelReady,
    V2Model,
    V2Captions,
    V2Error,
)


def definitions() -> dict[str, Any]:
    """The schemas by name, and those that they refer to."""
    _, schema = models_json_schema(
        [(model, "serialization") for model in _ROOTS], ref_template="#/components/schemas/{model}"
    )
    found: dict[str, Any] = schema["$defs"]
    return found
