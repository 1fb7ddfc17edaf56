"""Serves OpenAI's Responses API: a caption as the only output of a response, whole or as named events.

No response is stored, so a request must hold its image itself.
"""

import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from snapcap.models.text import SYSTEM, USER
from snapcap.service.api.answers import (
    LABELS,
    Answers,
    ChatFields,
    ChatRequest,
    answer_member,
    caption_options,
    chat_fields,
    stops,
    switch,
    usage_of,
)
from snapcap.service.api.conversation import IMAGES, TextUse, read_messages, text_of
from snapcap.service.api.openai import OPTIONS, any_model
from snapcap.service.captioning.model_defaults import regions_member
from snapcap.service.captioning.options import NEUTRAL, sort_fields
from snapcap.service.captioning.stream import CaptionStream
from snapcap.service.http.bodies import member_object
from snapcap.service.http.middleware import request_id
from snapcap.service.http.problems import OPENAI
from snapcap.service.http.replies import JsonReply, NamedEventStream, ignored_header
from snapcap.service.http.routing import Api, RouteGroup

# Fields that name what a request does not hold, each with the values that name nothing.
ELSEWHERE: Mapping[str, tuple[Any, ...]] = {"previous_response_id": (), "conversation": (), "background": (False,)}
FIELDS = ("model", "input", "instructions", "stream", "stream_options", "stop", "text")
_NEUTRAL = {**NEUTRAL, **ELSEWHERE}
_MOST_LABELS = 16  # in `metadata`
_LABEL = re.compile(r"[^\ud800-\udfff]{0,512}")  # UTF-8 has no lone surrogates, which JSON can spell
_EXAMPLE = '{"model": "…", "input": [{"role": "user", "content": [{"type": "input_image", …}]}]}'


class ResponsesRoutes:
    """Serves the endpoint of the API for one captioner."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def group(self) -> RouteGroup:
        routes = [Route("/v1/responses", self.create_response, methods=["POST"])]
        return RouteGroup("OpenAI", routes, Api("responses", OPENAI, captions=True))

    async def create_response(self, request: Request) -> Response:
        """Captions the newest image in the input. Texts, options and refusals are those of POST
        /v1/chat/completions. A model that takes instructions reads `instructions` if no user message has a text. A
        model that reads conversations reads `instructions` as a system message. The server stores no response."""
        answers = self._answers
        with answers.captioner.admit() as permit:
            chat = await answers.read(request, sort_response, read_response, permit)
            model = str(answers.captioner.served(chat.options.model).model_name)
            if chat.stream:
                events = partial(self._events, request, model, chat)
                return await answers.streamed(request, chat, permit, events, NamedEventStream)
            stream, text = await answers.whole(request, chat, permit)
        whole = _Answer(request, model, chat, answers.warnings(chat, stream)).ended(stream, text)
        return JsonReply(whole, ignored_header(chat.options.ignored))

    async def _events(
        self, request: Request, model: str, chat: ChatRequest, stream: CaptionStream, pieces: AsyncIterator[str]
    ) -> AsyncGenerator[str, None]:
        answer, count = _Answer(request, model, chat, self._answers.warnings(chat, stream)), 0

        def event(name: str, **members: Any) -> str:
            nonlocal count
            data = json.dumps({"type": f"response.{name}", "sequence_number": count, **members})
            count += 1
            return f"response.{name}\ndata: {data}"

        part = {"item_id": answer.item_id, "output_index": 0, "content_index": 0}
        text = ""
        yield event("created", response=answer.response("in_progress"))
        yield event("in_progress", response=answer.response("in_progress"))
        yield event("output_item.added", output_index=0, item=answer.item("in_progress"))
        yield event("content_part.added", **part, part=_part(""))
        try:
            async for piece in pieces:
                text += piece
                yield event("output_text.delta", **part, delta=piece, logprobs=[])
        except Exception as error:
            failure = self._answers.handler.note(request, error)
            members = {"code": "server_error", "message": failure.detail}
            yield event("failed", response=answer.response("failed", error=members))
            return
        ended = answer.ended(stream, text)
        yield event("output_text.done", **part, text=text, logprobs=[])
        yield event("content_part.done", **part, part=_part(text))
        yield event("output_item.done", output_index=0, item=ended["output"][0])
        yield event(ended["status"], response=ended)


class _Answer:
    """Writes the response object of one request, at its begin, at its end, or after a failure."""

    def __init__(self, request: Request, model: str, chat: ChatRequest, warnings: Mapping[str, Any]) -> None:
        identity = request_id(request.scope)
        self.item_id = f"msg_{identity}"
        sampling = chat.options.sampling
        form = {"type": "text"} if chat.member is None else {"type": "json_object"}
        self._head = {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": sampling.max_new_tokens,
            "text": {"format": form},
            "instructions": None,
            "metadata": dict(chat.metadata),
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "store": False,
            **warnings,
        }

    def response(self, status: str, **members: Any) -> dict[str, Any]:
        nothing: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**self._head, "status": status, **nothing, **members}

    def item(self, status: str, *content: Mapping[str, Any]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": [*content]}

    def ended(self, stream: CaptionStream, text: str) -> dict[str, Any]:
        prompt, completion = usage_of(stream)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        whole = stream.finish_reason != "length"
        status = "completed" if whole else "incomplete"
        details = None if whole else {"reason": "max_output_tokens"}
        output = [self.item(status, _part(text))]
        found = regions_member(stream.answer.regions)
        return self.response(status, incomplete_details=details, output=output, usage=usage, **found)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def sort_response(body: bytes) -> ChatFields:
    """Returns the members of a request. Raises BadRequest."""
    return any_model(
        chat_fields(body, _EXAMPLE, (*FIELDS, *OPTIONS, *LABELS), (*OPTIONS, "stop"), neutral=_NEUTRAL)
    )


def read_response(fields: ChatFields, use: TextUse) -> ChatRequest:
    """Returns the parsed request. Raises BadRequest, with the field as `option`."""
    document = fields.document
    texts = sort_fields(member_object(document.get("text"), "text").items(), ("format",), ())
    member = answer_member(dict(texts.known).get("format"), "text.format")
    asked = read_messages(_items(document.get("input")), use, where="input")
    ignored = [*texts.ignored]
    if instructions := text_of(document.get("instructions", ""), "instructions"):
        before = asked.around.before
        if use is TextUse.CONVERSE and SYSTEM not in [role for role, _ in before]:
            asked = replace(asked, around=replace(asked.around, before=((SYSTEM, instructions), *before)))
        elif use in (TextUse.INSTRUCT, TextUse.CONVERSE) and not (asked.text or asked.around.asks):
            asked = replace(asked, text=instructions)
        else:
            ignored.append("instructions")
    return ChatRequest(
        image=asked.image,
        options=caption_options(fields, document, OPTIONS, asked, member, "input").ignoring(*ignored),
        stop=stops(document.get("stop", [])),
        stream=switch(document, "stream"),
        member=member,
        metadata=_metadata(document.get("metadata")),
    )


def _metadata(given: Any) -> tuple[tuple[str, str], ...]:
    """Returns the labels of a request that its response repeats. Labels that OpenAI would refuse are left out: they
    change no caption."""
    if not isinstance(given, dict) or len(given) > _MOST_LABELS:
        return ()
    labels = [(name, value) for name, value in given.items() if isinstance(value, str)]
    return tuple(label for label in labels if all(map(_LABEL.fullmatch, label)))


def _items(given: Any) -> Any:
    """Returns the items of an input as messages: a text is a user's message, and an item that is no message, such
    as the output of a tool, is a tool's. Any item that may be an image counts as one."""
    if isinstance(given, str):
        return [{"role": USER, "content": given}]
    if not isinstance(given, list):
        return given
    return [
        {"role": "tool", "content": _content(item)}
        if isinstance(item, dict) and (item.get("type") or "message") != "message"
        else item
        for item in given
    ]


def _content(item: Mapping[str, Any]) -> Any:
    """Returns the content of an item that is no message. The output of a computer is one screenshot, not a list of
    parts."""
    output = item.get("output")
    if isinstance(output, dict):
        return [{**output, "type": IMAGES[-1]}] if IMAGES[0] in output else [output]
    return [item] if output is None and "image" in str(item["type"]) else output
