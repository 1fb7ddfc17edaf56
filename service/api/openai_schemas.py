"""Describes the two OpenAI APIs, chat completions and responses, in the OpenAPI document."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from snapcap.models.text import USER
from snapcap.service import errors
from snapcap.service.api.answers import LABELS, MAX_STOP_CHARACTERS, MAX_STOPS
from snapcap.service.api.caption_schemas import Timings
from snapcap.service.api.conversation import IMAGES, OTHER_ROLES, TEXTS
from snapcap.service.api.openai import OPTIONS
from snapcap.service.api.responses import ELSEWHERE
from snapcap.service.api.schema_parts import (
    EXAMPLE_IMAGE,
    EXAMPLE_MODEL,
    MODEL_NAME,
    NAMED,
    URLS,
    ClosedReply,
    Omittable,
    Operation,
    OptionalRegions,
    json_body,
    nullable,
    reply,
    request_object,
    streamed_reply,
)
from snapcap.service.captioning import options as caption_options
from snapcap.service.captioning.options import EMPTY, NEUTRAL
from snapcap.service.http.replies import EventStream, NamedEventStream

SWITCH: dict[str, Any] = {"type": ["boolean", "null"]}
UNREAD: dict[str, Any] = {"description": "The server does not read the field."}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
STOP: dict[str, Any] = {
    "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]
}


def _image(urls: bool) -> dict[str, Any]:
    url: dict[str, Any] = {"type": "string", "format": "data-uri", "description": "A data URI with base64."}
    if urls:
        remote = {"type": "string", "format": "uri", "description": "An http(s) URL of an allowed host."}
        url = {"anyOf": [url, remote]}
    # OpenAI's form is an object with the URL; some clients send the URL alone.
    either = {"anyOf": [request_object(["url"], url=url), url]}
    return request_object(["type", "image_url"], type={"enum": [*IMAGES]}, image_url=either)


def _user(content: dict[str, Any]) -> dict[str, Any]:
    return request_object(["role", "content"], role={"const": USER}, content=content, images={"enum": [None, []]})


def _text(schema: dict[str, Any]) -> dict[str, Any]:
    return request_object(["type", "text"], type={"enum": [*TEXTS]}, text=schema, image_url={"type": "null"})


def _one_message(image: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of messages whose text is continued. `image`: the schema of an image."""
    text = _text(caption_options.schema()["prompt"])
    # The content has one image and at most one text, in either order.
    orders = [[image], [image, text], [text, image]]
    content = {
        "oneOf": [
            {"type": "array", "prefixItems": order, "items": False, "minItems": len(order)} for order in orders
        ],
        "description": "One image, and optionally the text that the caption continues.",
    }
    return {"type": "array", "items": _user(content), "minItems": 1, "maxItems": 1}


def _conversation(image: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of messages whose text is ignored. The newest image of the messages counts. `image`: the
    schema of an image."""
    parts = {"type": "array", "items": {"anyOf": [image, _text({"type": "string"})]}}
    user = _user({"anyOf": [{"type": "string"}, parts]})
    other = request_object(
        ["role"],
        role={"enum": [*OTHER_ROLES]},
        content={"anyOf": [{"type": ["string", "null"]}, parts]},
        images={"enum": [None, []]},
    )
    return {
        "type": "array",
        "items": {
            "anyOf": [user, {**other, "description": "The server ignores the message, except for its images."}]
        },
        "contains": _user({**parts, "contains": image, "maxContains": 1}),
        "description": "The server captions the newest image in the messages. It ignores text and the rest.",
    }


def _answer_form(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a field that asks for text or JSON. `schema`: the members of the form json_schema."""
    schema_or_none = {"type": ["object", "null"]}
    text = request_object(["type"], type={"const": "text"})
    any_object = request_object(
        ["type"], type={"enum": ["json_object", "json"]}, value=schema_or_none, schema=schema_or_none
    )
    by_schema = request_object(["type", *schema], type={"const": "json_schema"}, **schema)
    return {
        "anyOf": [{"enum": [*EMPTY, None]}, text, any_object, by_schema],
        "description": "With `json_object` or `json` the answer is an object with the member `caption`, or that of "
        "a schema in `value` or `schema`. A schema must be that of an object with one required member, of type "
        "string and with no other rule than `maxLength`.",
    }


def unserved(neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Returns the schemas of fields that are not served. `neutral`: the values that change nothing."""
    return {
        field: {"enum": [*values, *EMPTY, None], "description": "The server supports no other value."}
        for field, values in neutral.items()
    }


def _shared_fields() -> dict[str, Any]:
    """Returns the schemas of the fields of a chat and of a response."""
    options = caption_options.schema()
    return {
        "model": {
            "type": ["string", "null"],
            "description": "The name of the served model. `dummy` means the served model too.",
        },
        "stream": {**SWITCH, "default": False},
        "stop": STOP,
        **{field: nullable(options[name]) for field, name in OPTIONS.items()},
        **dict.fromkeys(LABELS, UNREAD),
    }


def _chat_body(messages: dict[str, Any]) -> dict[str, Any]:
    usage = request_object([], include_usage=SWITCH, include_obfuscation=UNREAD)
    shared = _shared_fields()
    request = request_object(
        ["messages"],
        messages=messages,
        stream_options={**nullable(usage), "description": "Allowed only with `stream`."},
        response_format=_answer_form({"json_schema": request_object(["schema"], schema={"type": "object"})}),
        **shared,
        **unserved({name: values for name, values in NEUTRAL.items() if name not in (*shared, "response_format")}),
    )
    url = {"url": f"data:image/png;base64,{EXAMPLE_IMAGE}"}
    message = {"role": USER, "content": [{"type": "image_url", "image_url": url}]}
    return json_body(request, {"model": EXAMPLE_MODEL, "messages": [message]})


def _response_body(messages: dict[str, Any]) -> dict[str, Any]:
    labels = {"description": "Labels of the request. The response repeats up to 16 texts of 512 characters."}
    request = request_object(
        ["input"],
        input=messages,
        instructions={"type": ["string", "null"]},
        stream_options=UNREAD,
        text=nullable(request_object([], format=_answer_form({"schema": {"type": "object"}}))),
        **{**_shared_fields(), "metadata": labels},
        **unserved(ELSEWHERE),
    )
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{EXAMPLE_IMAGE}"}
    return json_body(request, {"model": EXAMPLE_MODEL, "input": [{"role": USER, "content": [image]}]})


def operations(urls: bool, continue_text: bool) -> dict[str, Operation]:
    """Returns the operation of each route by its name. `urls`: http(s) URLs of images are allowed for some hosts.
    `continue_text`: the text of a message is the beginning of the caption."""
    # The schema of the messages of a chat, and of the input of a response.
    messages = (_one_message if continue_text else _conversation)(_image(urls))
    captioned = "The caption, or with stream its pieces as server-sent events"
    chat_events = (
        "Events `data: CHUNK`, then `data: [DONE]`. After the first event, an error is sent as `data: ERROR` "
        "and ends the stream."
    )
    events = "Events `event: response.NAME` with `data`. An error after the first event is `response.failed`."
    return {
        "create_chat_completion": Operation(
            "Caption the image of a message",
            streamed_reply(captioned, "ChatCompletion", EventStream, chat_events),
            (*NAMED, *URLS),
            _chat_body(messages),
        ),
        "create_response": Operation(
            "Caption the image of an input",
            streamed_reply(captioned, "ResponseObject", NamedEventStream, events),
            (*NAMED, *URLS),
            _response_body(messages),
        ),
        "list_models": Operation("List the models", reply("The served model", "ModelList"), [errors.NotReady]),
        "retrieve_model": Operation(
            "Describe the model",
            reply("The model", "Model"),
            [errors.ModelNotFound, errors.NotReady],
            parameters=[MODEL_NAME],
        ),
    }


class ErrorMembers(ClosedReply):
    message: str = Field(description="The error and what to do, as text.")
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The name of the invalid field.")
    code: str


class OpenAIError(ClosedReply):
    error: ErrorMembers


class Model(ClosedReply):
    id: str
    object: Literal["model"]
    created: int = Field(description="Unix time in seconds since which the model has been served.")
    owned_by: str
    state: Omittable[str] = Field(
        description="absent, waking, ready or leaving, if the server has several models or has one that may leave."
    )


class ModelList(ClosedReply):
    object: Literal["list"]
    data: list[Model]


class Usage(ClosedReply):
    """Counts tokens of text. An image counts as 0 tokens."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class ChatMessage(ClosedReply):
    role: Literal["assistant"]
    content: str = Field(description="The caption without the text of the request that it begins with.")
    refusal: None


class ChatChoice(ClosedReply):
    index: Literal[0]
    message: ChatMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


# The type of a member that only some replies have.
OptionalTexts = Annotated[
    Omittable[list[str]],
    Field(description="Names the parts of the request that were ignored. Absent if nothing was."),
]


class ChatCompletion(ClosedReply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice] = Field(min_length=1, max_length=1)
    usage: Usage
    regions: OptionalRegions
    warnings: OptionalTexts


class ChatDelta(ClosedReply):
    role: Literal["assistant"] = Field(default="assistant", description="The role, in the first chunk only.")
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
    usage: Usage | None = Field(
        default=None, description="The usage, in the last chunk, with stream_options.include_usage."
    )
    backend: Omittable[str] = Field(
        description="The backend that ran the request, in the chunk of the usage. Absent if a stop sequence ended "
        "the caption."
    )
    timings: Omittable[Timings] = Field(
        description="The timings, as in a reply of /v1/caption. Present if `backend` is."
    )
    regions: OptionalRegions
    warnings: OptionalTexts


class ResponseText(ClosedReply):
    type: Literal["output_text"]
    text: str = Field(description="The caption without the text of the request that it begins with.")
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[Any] = Field(max_length=0)


class ResponseMessage(ClosedReply):
    id: str
    type: Literal["message"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[ResponseText] = Field(min_length=1, max_length=1)


class ResponseUsage(ClosedReply):
    """Counts tokens of text. An image counts as 0 tokens."""

    input_tokens: int = Field(ge=0)
    input_tokens_details: dict[str, int]
    output_tokens: int = Field(ge=0)
    output_tokens_details: dict[str, int]
    total_tokens: int = Field(ge=0)


class ResponseObject(ClosedReply):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None = Field(description="The reason, if the caption reached its limit.")
    output: list[ResponseMessage] = Field(min_length=1, max_length=1)
    usage: ResponseUsage
    temperature: float
    top_p: float
    max_output_tokens: int | None
    text: dict[str, dict[str, str]]
    instructions: None
    metadata: dict[str, str]
    parallel_tool_calls: Literal[False]
    tool_choice: Literal["none"]
    tools: list[Any] = Field(max_length=0)
    store: Literal[False]
    regions: OptionalRegions
    warnings: OptionalTexts


ROOTS: tuple[type[BaseModel], ...] = (OpenAIError, ModelList, ChatCompletion, ChatCompletionChunk, ResponseObject)
