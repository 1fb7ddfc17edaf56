"""Answers GET /v1/models, GET /v1/models/{model} and POST /v1/chat/completions, compatible with OpenAI clients."""

import json
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.api.bodies.disconnect import unless_disconnected
from snapcap.service.api.bodies.json_body import read_json
from snapcap.service.api.bodies.replies import EventStream, JsonReply, ignored_header
from snapcap.service.api.caption.request import JSON, UNTYPED, is_json, media_type
from snapcap.service.api.middleware.problem_handler import ProblemHandler
from snapcap.service.api.middleware.request_id import request_id
from snapcap.service.api.middleware.request_log import new_caption
from snapcap.service.api.openai.image_fetcher import ImageFetcher
from snapcap.service.api.openai.request import ChatRequest, parse_chat
from snapcap.service.api.problems import OPENAI, openai_error
from snapcap.service.api.routing import Api, RouteGroup
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.captioning.stream import CaptionStream
from snapcap.service.engine.admission import Permit
from snapcap.service.errors import UnsupportedMediaType
from snapcap.service.memory import body_account

# The model names that huggingface_hub's chat client sends if it has only an address, now and in older versions. The
# empty name is that of other clients whose user chose none.
_ANY_MODEL = ("dummy", "tgi", "")


class OpenAIRoutes:
    """Serves the endpoints of the API for one captioner."""

    def __init__(
        self,
        captioner: Captioner,
        limits: BodyLimits,
        fetcher: ImageFetcher,
        handler: ProblemHandler,
        *,
        continue_text: bool,
    ) -> None:
        """`continue_text`: see `parse_chat`."""
        self._captioner = captioner
        self._continue_text = continue_text
        self._limits = limits
        self._fetcher = fetcher
        self._handler = handler

    def group(self) -> RouteGroup:
        routes = [
            Route("/v1/chat/completions", self.create_chat_completion, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{model:path}", self.retrieve_model),
        ]
        return RouteGroup("OpenAI", routes, Api("openai", OPENAI, captions=True))

    async def list_models(self, request: Request) -> Response:
        """The one model that is served."""
        return JsonReply({"object": "list", "data": [self._model(None)]})

    async def retrieve_model(self, request: Request) -> Response:
        """The model, if it is the one that is served. Its name may hold slashes."""
        return JsonReply(self._model(request.path_params["model"]))

    async def create_chat_completion(self, request: Request) -> Response:
        """Captions the newest image of the messages, a data URI, whoever sent it. A captioner takes no
        instructions: text, system messages and replies are ignored, and so are fields that do not change a caption.
        The header X-Snapcap-Ignored names what was there of them. `prompt` is the beginning of the caption, and the
        reply is what follows it; with `--chat-text continue` the text of the only message is. Of a model with a
        chat template the last text of a user is its instruction.

        Decoding is greedy unless a temperature is given. A bound on the tokens above what the model holds means as
        many as it holds. A field that would change the caption, and is not served, is refused."""
        with self._captioner.admit() as permit:
            kind = media_type(request)
            if not is_json(kind) and kind not in UNTYPED:
                raise UnsupportedMediaType(f"Send {JSON}.")
            parse = partial(
                parse_chat, continue_text=self._continue_text, instruct=self._captioner.takes_instructions
            )
            wanted = await read_json(request, self._limits, self._captioner.pool, parse)
            model, _ = self._captioner.served_model(None if wanted.model in _ANY_MODEL else wanted.model)
            identity = f"chatcmpl-{request_id(request.scope)}"
            head = {"id": identity, "created": int(time.time()), "model": model}
            if wanted.stream:
                return await self._streamed(request, wanted, permit, head)
            whole = await unless_disconnected(request.receive, self._whole(request, wanted, permit, head))
            return JsonReply(whole, ignored_header(wanted.ignored))

    def _model(self, name: str | None) -> dict[str, Any]:
        name, created = self._captioner.served_model(name)
        return {"id": name, "object": "model", "created": int(created), "owned_by": "snapcap"}

    async def _open(self, request: Request, chat: ChatRequest, permit: Permit) -> CaptionStream:
        identity, account = request_id(request.scope), body_account(request.scope)
        image = chat.image if isinstance(chat.image, bytes) else await self._fetcher.fetch(chat.image, account)
        permit.take()
        times = new_caption(request.scope)
        return await self._captioner.stream(
            image, chat.options, identity, permit, chat.stop, account, times, live=chat.stream
        )

    async def _whole(
        self, request: Request, chat: ChatRequest, permit: Permit, head: dict[str, Any]
    ) -> dict[str, Any]:
        stream = await self._open(request, chat, permit)
        try:
            message = {"role": "assistant", "content": await stream.rest(), "refusal": None}
        finally:
            stream.close()
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": stream.finish_reason}
        return {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(stream)}

    async def _streamed(
        self, request: Request, chat: ChatRequest, permit: Permit, head: dict[str, Any]
    ) -> Response:
        # The reply starts with the first text, so that an error before it still gets its status.
        stream, first = await unless_disconnected(request.receive, self._begin(request, chat, permit))
        return EventStream(
            self._events(request, stream, first, head, chat.include_usage),
            stream.close,
            lambda error: self._handler.note(request, error),
            ignored_header(chat.ignored),
        )

    async def _begin(self, request: Request, chat: ChatRequest, permit: Permit) -> tuple[CaptionStream, str | None]:
        stream = await self._open(request, chat, permit)
        try:
            return stream, await anext(stream, None)
        except BaseException:
            stream.close()
            raise

    async def _events(
        self, request: Request, stream: CaptionStream, piece: str | None, head: dict[str, Any], include_usage: bool
    ) -> AsyncGenerator[str, None]:
        def chunk(choices: list[dict[str, Any]], usage: dict[str, int] | None = None, **more: Any) -> str:
            body = {**head, "object": "chat.completion.chunk", "choices": choices}
            return json.dumps({**body, "usage": usage, **more} if include_usage else body)

        def delta(content: dict[str, str], finish_reason: str | None = None) -> str:
            return chunk([{"index": 0, "delta": content, "logprobs": None, "finish_reason": finish_reason}])

        yield delta({"role": "assistant", "content": ""})
        try:
            while piece is not None:
                yield delta({"content": piece})
                piece = await anext(stream, None)
        except Exception as error:
            yield json.dumps(openai_error(self._handler.note(request, error)))
            return
        yield delta({}, stream.finish_reason)
        if include_usage:
            yield chunk([], _usage(stream), **_spent(stream))
        yield "[DONE]"


def _usage(stream: CaptionStream) -> dict[str, int]:
    prompt, completion = stream.prompt_tokens, stream.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _spent(stream: CaptionStream) -> dict[str, Any]:
    """Returns the backend and the timings, as in a reply of /v1/caption."""
    spent = stream.spent()
    return {} if spent is None else {"backend": spent[0], "timings": spent[1]}
