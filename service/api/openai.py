"""Serves OpenAI's chat completions, whole or streamed, and its list of models."""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
from snapcap.service.api.conversation import TextUse, read_messages
from snapcap.service.captioning import options
from snapcap.service.captioning.model_defaults import regions_member
from snapcap.service.captioning.stream import CaptionStream
from snapcap.service.http.bodies import member_object
from snapcap.service.http.middleware import request_id
from snapcap.service.http.problems import OPENAI, openai_error
from snapcap.service.http.replies import JsonReply, ignored_header
from snapcap.service.http.routing import Api, RouteGroup

# The model names that huggingface_hub's chat client sends if it has only an address, now and in older versions.
_ANY_MODEL = ("dummy", "tgi")
_EXAMPLE = '{"model": "…", "messages": [{"role": "user", "content": [{"type": "image_url", …}]}]}'
# The option that each field gives. A later field overrides an earlier one of the same option.
OPTIONS: Mapping[str, str] = {
    field: name for name, each in options.OPTIONS.items() for field in each.openai or (name,)
}
_FIELDS = ("model", "messages", "stream", "stream_options", "stop", "response_format")


class OpenAIRoutes:
    """Serves the endpoints of the API for one captioner."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def group(self) -> RouteGroup:
        routes = [
            Route("/v1/chat/completions", self.create_chat_completion, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{model:path}", self.retrieve_model),
        ]
        return RouteGroup("OpenAI", routes, Api("openai", OPENAI, captions=True))

    async def list_models(self, request: Request) -> Response:
        """Lists the models, the first first: the model of requests that name none."""
        names: list[str | None] = [*self._answers.captioner.models]
        return JsonReply({"object": "list", "data": [self._model(name) for name in names or [None]]})

    async def retrieve_model(self, request: Request) -> Response:
        """Returns the model of this name, which may contain slashes."""
        name = request.path_params["model"]
        return JsonReply(self._model(name)) if name else await self.list_models(request)  # an address ends with /

    async def create_chat_completion(self, request: Request) -> Response:
        """Captions the newest image in the messages, whatever the role of its message.

        A captioner takes no instructions: the server ignores text, system messages, replies, and fields that do not
        change a caption. The header X-Snapcap-Ignored and `warnings` in the reply name the ignored parts. `prompt`
        is the beginning of the caption, and the reply is the rest of the caption. With `--chat-text continue`, the
        text of the only message is the beginning. For a model with a chat template, the last text of a user is the
        instruction. Qwen3-VL reads the other messages too.

        Decoding is greedy unless the request has a temperature. A token limit above the model's maximum means the
        maximum. The server refuses a field that would change the caption and that it does not support."""
        answers = self._answers
        with answers.captioner.admit() as permit:
            chat = await answers.read(request, sort_chat, read_chat, permit)
            identity = f"chatcmpl-{request_id(request.scope)}"
            model = answers.captioner.served(chat.options.model).model_name
            head = {"id": identity, "created": int(time.time()), "model": model}
            if chat.stream:
                return await answers.streamed(request, chat, permit, partial(self._events, request, head, chat))
            stream, text = await answers.whole(request, chat, permit)
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": stream.finish_reason}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(stream)}
        whole |= {**regions_member(stream.answer.regions), **answers.warnings(chat, stream)}
        return JsonReply(whole, ignored_header(chat.options.ignored))

    def _model(self, name: str | None) -> dict[str, Any]:
        model = self._answers.captioner.served(name)
        known = {} if model.state is None else {"state": model.state}
        created = int(model.created)
        return {"id": model.model_name, "object": "model", "created": created, "owned_by": "snapcap", **known}

    async def _events(
        self,
        request: Request,
        head: dict[str, Any],
        chat: ChatRequest,
        stream: CaptionStream,
        pieces: AsyncIterator[str],
    ) -> AsyncGenerator[str, None]:
        usage: dict[str, Any] = {"usage": None} if chat.include_usage else {}

        def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
            return json.dumps({**head, "object": "chat.completion.chunk", "choices": choices, **usage, **more})

        def delta(content: dict[str, str], finish_reason: str | None = None, **more: Any) -> str:
            choice = {"index": 0, "delta": content, "logprobs": None, "finish_reason": finish_reason}
            return chunk([choice], **more)

        yield delta({"role": "assistant", "content": ""})
        try:
            async for piece in pieces:
                yield delta({"content": piece})
        except Exception as error:
            yield json.dumps(openai_error(self._answers.handler.note(request, error)))
            return
        more = {**regions_member(stream.answer.regions), **self._answers.warnings(chat, stream)}
        yield delta({}, stream.finish_reason, **more)
        if chat.include_usage:
            spent = stream.spent()  # the backend and the timings, as in a reply of /v1/caption
            known = {} if spent is None else {"backend": spent[0], "timings": spent[1]}
            yield chunk([], usage=_usage(stream), **known)
        yield "[DONE]"


def _usage(stream: CaptionStream) -> dict[str, int]:
    prompt, completion = usage_of(stream)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def sort_chat(body: bytes) -> ChatFields:
    """Returns the members of a request. Raises BadRequest."""
    return any_model(chat_fields(body, _EXAMPLE, (*_FIELDS, *OPTIONS, *LABELS), (*OPTIONS, "stop")))


def any_model(fields: ChatFields) -> ChatFields:
    """Returns the members, with "" in place of a model name that stands for any model."""
    return fields._replace(model="") if fields.model in _ANY_MODEL else fields


def read_chat(fields: ChatFields, use: TextUse) -> ChatRequest:
    """Returns the parsed request. Raises BadRequest, with the field as `option`."""
    document = fields.document
    member = answer_member(document.get("response_format"), "response_format")
    asked = read_messages(document.get("messages"), use)
    stream = switch(document, "stream")
    return ChatRequest(
        image=asked.image,
        options=caption_options(fields, document, OPTIONS, asked, member, "messages"),
        stop=stops(document.get("stop", [])),
        stream=stream,
        member=member,
        include_usage=_include_usage(document.get("stream_options"), stream),
    )


def _include_usage(options: Any, stream: bool) -> bool:
    given = member_object(options, "stream_options")
    return switch(given, "include_usage", "stream_options.include_usage") and stream
