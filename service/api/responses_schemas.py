"""Describes the Responses API in the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from snapcap.service import errors
from snapcap.service.api.openai_schemas import (
    UNREAD,
    OptionalTexts,
    answer_form,
    messages_schema,
    shared_fields,
    unserved,
)
from snapcap.service.api.responses import ELSEWHERE
from snapcap.service.api.schema_parts import (
    BODY,
    CAPTION,
    EXAMPLE_IMAGE,
    EXAMPLE_MODEL,
    JSON_BODY,
    URLS,
    ClosedReply,
    OptionalRegions,
    caption_reply,
    nullable,
    problems,
    request_object,
    streamed_reply,
)
from snapcap.service.http.problems import OPENAI
from snapcap.service.http.replies import NamedEventStream

_ERRORS = (*JSON_BODY, *BODY, *CAPTION, errors.UnsupportedOption, errors.ModelNotFound, *URLS)


def operations(urls: bool, continue_text: bool) -> dict[str, dict[str, Any]]:
    """Returns FastAPI's keyword arguments for each route, by the name of the route. `urls`, `continue_text`: see
    the chat's."""
    whole = caption_reply("The caption, or with stream its pieces as server-sent events", "ResponseObject")
    events = "Events `event: response.NAME` with `data`. An error after the first event is `response.failed`."
    return {
        "create_response": {
            "summary": "Caption the image of an input",
            "responses": streamed_reply(whole, NamedEventStream, events) | problems(*_ERRORS, shape=OPENAI),
            "openapi_extra": _body(urls, continue_text),
        },
    }


def _body(urls: bool, continue_text: bool) -> dict[str, Any]:
    request = request_object(
        ["input"],
        {
            "input": messages_schema(urls, continue_text),
            "instructions": {"type": ["string", "null"]},
            "stream_options": UNREAD,
            "text": nullable(request_object([], {"format": answer_form({"schema": {"type": "object"}})})),
            **shared_fields(),
            **unserved(ELSEWHERE),
        },
    )
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{EXAMPLE_IMAGE}"}
    example = {"model": EXAMPLE_MODEL, "input": [{"role": "user", "content": [image]}]}
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": request, "example": example}},
        }
    }


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


ROOTS: tuple[type[BaseModel], ...] = (ResponseObject,)
