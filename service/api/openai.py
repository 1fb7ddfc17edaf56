"""Serves OpenAI's chat completions, whole or streamed, and its list of models.

Chat clients send whole conversations: a system message, replies, earlier images, a question about the last image.
Most models take no instructions. For them the newest image of any role is captioned; the rest is ignored, and the
reply names it. With `--chat-text continue` there must be one message, and its text is the beginning of the caption.
A model with a chat template takes instructions: the last text of a user is the instruction.
"""

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from snapcap.models.dataclass import dataclass
from snapcap.service.api.caption import open_stream
from snapcap.service.api.image_fetcher import ImageFetcher
from snapcap.service.captioning import options
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.captioning.model_defaults import regions_member
from snapcap.service.captioning.options import CaptionOptions, options_from_json, sort_fields
from snapcap.service.captioning.stream import CaptionStream, begun
from snapcap.service.engine.admission import Permit
from snapcap.service.errors import InvalidOption, MissingImage, TooManyImages, UnsupportedMediaType
from snapcap.service.http.bodies import (
    JSON,
    UNTYPED,
    BodyLimits,
    image_or_url,
    is_json,
    json_object,
    media_type,
    read_json,
)
from snapcap.service.http.json_text import is_data_uri, is_url
from snapcap.service.http.middleware import ProblemHandler, request_id
from snapcap.service.http.problems import OPENAI, openai_error
from snapcap.service.http.replies import EventStream, JsonReply, ignored_header, ignored_names, unless_disconnected
from snapcap.service.http.routing import Api, RouteGroup

# The model names that huggingface_hub's chat client sends if it has only an address, now and in older versions. The
# empty name is that of other clients whose user chose none.
_ANY_MODEL = ("dummy", "tgi", "")
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000
_EXAMPLE = '{"model": "…", "messages": [{"role": "user", "content": [{"type": "image_url", …}]}]}'
# The option that each field gives. A later field overrides an earlier one of the same option.
OPTIONS: Mapping[str, str] = {
    field: name for name, each in options.OPTIONS.items() for field in each.openai or (name,)
}
# Fields that label a request for its sender. They have no effect on any server, so a reply does not name them.
LABELS = ("user", "metadata")
_FIELDS = ("model", "messages", "stream", "stream_options", "stop")
USER = "user"
# Roles whose texts are ignored, each with the name of the texts in X-Snapcap-Ignored.
OTHER_ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "assistant": "replies",
    "tool": "replies",
    "function": "replies",
}
# Types of content parts. The second type of each is from OpenAI's Responses API; some clients use it in chats too.
IMAGES = ("image_url", "input_image")
TEXTS = ("text", "input_text")
_PARTS = f"be a content part of type {TEXTS[0]} or {IMAGES[0]}"
_NO_IMAGE = "The messages have no image; send one as a content part of type image_url with a data URI."


@dataclass(frozen=True)
class ChatRequest:
    """Holds a parsed request. `model` None: the served model. `image`: the bytes of a data URI, or an http(s) URL.
    `ignored`: names of the ignored parts of the messages and of the ignored fields."""

    model: str | None
    image: bytes | str
    options: CaptionOptions
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class Conversation:
    """Holds the parsed messages. `image`: the bytes of a data URI, or an http(s) URL. `text`: the beginning of the
    caption, or an instruction. `ignored`: names of the ignored parts: text, system, replies, images."""

    image: bytes | str
    text: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Message:
    """Holds the content of one message. `images`: the parts that are or may be images, each with its place for
    errors. `texts`: the texts of all other parts; for roles other than the user, content parts give empty texts."""

    texts: Sequence[str]
    images: Sequence[tuple[Mapping[str, Any], str]]


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
        """Lists the served model, which is the only one."""
        return JsonReply({"object": "list", "data": [self._model(None)]})

    async def retrieve_model(self, request: Request) -> Response:
        """Returns the model, if the name is the served model's. The name may contain slashes."""
        name = request.path_params["model"]
        return JsonReply(self._model(name)) if name else await self.list_models(request)  # an address ends with /

    async def create_chat_completion(self, request: Request) -> Response:
        """Captions the newest image in the messages, whatever the role of its message.

        A captioner takes no instructions: the server ignores text, system messages, replies, and fields that do not
        change a caption. The header X-Snapcap-Ignored and `warnings` in the reply name the ignored parts. `prompt`
        is the beginning of the caption, and the reply is the rest of the caption. With `--chat-text continue`, the
        text of the only message is the beginning. For a model with a chat template, the last text of a user is the
        instruction.

        Decoding is greedy unless the request has a temperature. A token limit above the model's maximum means the
        maximum. The server refuses a field that would change the caption and that it does not support."""
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
        image, options, live = chat.image, chat.options, chat.stream
        return await open_stream(
            request, self._captioner, self._fetcher, image, options, permit, chat.stop, live=live
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
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(stream)}
        return {**whole, **regions_member(stream.answer.regions), **self._warnings(chat)}

    async def _streamed(
        self, request: Request, chat: ChatRequest, permit: Permit, head: dict[str, Any]
    ) -> Response:
        # The reply starts with the first text, so that an error before it still gets its status.
        stream, first = await unless_disconnected(request.receive, begun(self._open(request, chat, permit)))
        return EventStream(
            self._events(request, stream, first, head, chat),
            stream.close,
            lambda error: self._handler.note(request, error),
            ignored_header(chat.ignored),
        )

    def _warnings(self, chat: ChatRequest) -> dict[str, list[str]]:
        """Returns the member that tells the user of a chat what was ignored; {} if nothing was."""
        if not chat.ignored:
            return {}
        said = not {"text", *OTHER_ROLES.values()}.isdisjoint(chat.ignored)
        useless = said and not self._captioner.takes_instructions
        why = " This model takes no instructions or questions." if useless else ""
        return {"warnings": [f"Ignored: {ignored_names(chat.ignored)}.{why}"]}

    async def _events(
        self, request: Request, stream: CaptionStream, piece: str | None, head: dict[str, Any], chat: ChatRequest
    ) -> AsyncGenerator[str, None]:
        usage: dict[str, Any] = {"usage": None} if chat.include_usage else {}

        def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
            return json.dumps({**head, "object": "chat.completion.chunk", "choices": choices, **usage, **more})

        def delta(content: dict[str, str], finish_reason: str | None = None, **more: Any) -> str:
            choice = {"index": 0, "delta": content, "logprobs": None, "finish_reason": finish_reason}
            return chunk([choice], **more)

        yield delta({"role": "assistant", "content": ""})
        try:
            while piece is not None:
                yield delta({"content": piece})
                piece = await anext(stream, None)
        except Exception as error:
            yield json.dumps(openai_error(self._handler.note(request, error)))
            return
        yield delta({}, stream.finish_reason, **regions_member(stream.answer.regions), **self._warnings(chat))
        if chat.include_usage:
            yield chunk([], usage=_usage(stream), **_spent(stream))
        yield "[DONE]"


def _usage(stream: CaptionStream) -> dict[str, int]:
    prompt, completion = len(stream.prompt_ids), stream.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _spent(stream: CaptionStream) -> dict[str, Any]:
    """Returns the backend and the timings, as in a reply of /v1/caption."""
    spent = stream.spent()
    return {} if spent is None else {"backend": spent[0], "timings": spent[1]}


def parse_chat(body: bytes, *, continue_text: bool = False, instruct: bool = False) -> ChatRequest:
    """Returns the parsed request. `continue_text`, `instruct`: see `read_messages`.

    Raises the subclasses of BadRequest that say what is wrong, with the field as `option`."""
    fields = sort_fields(json_object(body, _EXAMPLE).items(), (*_FIELDS, *OPTIONS, *LABELS), (*OPTIONS, "stop"))
    document = dict(fields.known)
    options = CaptionOptions(clamp=True)
    for field, option in OPTIONS.items():
        if field in document:
            options = _option(option, document[field], field, options)
    asked = read_messages(document.get("messages"), continue_text=continue_text, instruct=instruct)
    if asked.text:
        if options.prompt:
            raise InvalidOption("prompt", "be absent if the message has a text, because that text is the prompt")
        options = _option("prompt", asked.text, "messages", options)
    stream = _switch(document, "stream", "stream")
    include_usage = _include_usage(document.get("stream_options"), stream)
    return ChatRequest(
        model=text_of(document["model"], "model") if "model" in document else None,
        image=asked.image,
        options=options,
        stop=_stops(document.get("stop", [])),
        stream=stream,
        include_usage=include_usage,
        ignored=(*asked.ignored, *fields.ignored),
    )


def _option(name: str, value: Any, field: str, options: CaptionOptions) -> CaptionOptions:
    try:
        return options_from_json({name: value}, options)
    except InvalidOption as error:
        raise InvalidOption(field, error.must) from None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) and value else value or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise InvalidOption("stop", f"be text or a list of up to {MAX_STOPS} texts")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidOption("stop", f"have texts of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidOption("stream_options", 'be an object such as {"include_usage": true}')
    return _switch(options, "include_usage", "stream_options.include_usage") and stream


def _switch(values: Mapping[str, Any], name: str, where: str) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidOption(where, "be true or false")
    return bool(value)


def read_messages(messages: Any, *, continue_text: bool, instruct: bool = False) -> Conversation:
    """Returns the parsed messages. `continue_text`: there must be one message, and its text is the beginning of the
    caption, unless `instruct` is set. `instruct`: the last text of a user is an instruction.

    Raises InvalidOption, MissingImage, TooManyImages, UnprocessableImage."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidOption("messages", "be a list of messages")
    return _only_message(messages) if continue_text and not instruct else _newest_image(messages, instruct)


def _newest_image(messages: list[dict[str, Any]], instruct: bool) -> Conversation:
    ignored: set[str] = set()
    asked: _Message | None = None
    said = ""
    for index, message in enumerate(messages):
        role, where = message.get("role"), f"messages[{index}]"
        if not isinstance(role, str) or role not in (USER, *OTHER_ROLES):
            raise InvalidOption(f"{where}.role", f"be {', '.join((USER, *OTHER_ROLES))}")
        found = _read(message, where, strict=role == USER)
        text = "".join(found.texts)
        if role == USER and text.strip():
            ignored |= {"text"} if said or not instruct else set()
            said = text
        elif role != USER and (found.texts or not found.images):
            ignored.add(OTHER_ROLES[role])
        if found.images:
            ignored |= set() if asked is None else {"images"}
            asked = found
    if asked is None:
        raise MissingImage(_NO_IMAGE)
    return Conversation(_one_image(asked.images), said if instruct else "", tuple(sorted(ignored)))


def _only_message(messages: list[dict[str, Any]]) -> Conversation:
    if len(messages) != 1:
        raise InvalidOption(
            "messages", "be a list of one message; this server continues the text of a single message"
        )
    if messages[0].get("role") != USER:
        raise InvalidOption("messages[0].role", "be 'user'; this model takes no instructions")
    found = _read(messages[0], "messages[0]", strict=True)
    image = _one_image(found.images)
    if len(found.texts) > 1:
        raise InvalidOption("messages[0].content", "have one text part at most: the beginning of the caption")
    return Conversation(image, "".join(found.texts))


def _read(message: Mapping[str, Any], where: str, *, strict: bool) -> _Message:
    """Returns the texts and images of a message. `strict`: a content is required, and each part must be a text or
    an image.

    Any part that may be an image counts as one. Otherwise an older image would be captioned in its place."""
    images: list[tuple[Mapping[str, Any], str]] = []
    texts: list[str] = []
    content = message.get("content")
    if isinstance(content, str):
        texts.append(content)
    elif strict and not isinstance(content, list):
        raise InvalidOption(f"{where}.content", "be text or a list of content parts")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        place = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and ("image" in kind or "video" in kind):
            images.append((part, place))
        elif not strict:
            texts.append("")
        elif kind in TEXTS and part.get(IMAGES[0]) is None:
            texts.append(text_of(part.get("text"), f"{place}.text"))
        else:
            raise InvalidOption(place, _PARTS)
    if message.get("images"):  # some servers put the images of a reply here
        images.append(({"type": "images"}, f"{where}.images"))
    return _Message(texts, images)


def _one_image(images: Sequence[tuple[Mapping[str, Any], str]]) -> bytes | str:
    if not images:
        raise MissingImage(_NO_IMAGE)
    if len(images) > 1:
        raise TooManyImages(f"A message has {len(images)} images; send one image in each message.")
    ((part, where),) = images
    if part["type"] not in IMAGES:
        raise InvalidOption(where, _PARTS)
    url, where = part.get(IMAGES[0]), f"{where}.{IMAGES[0]}"
    if isinstance(url, dict):
        url, where = url.get("url", ""), f"{where}.url"
    elif not isinstance(url, str):
        raise InvalidOption(where, 'be an object such as {"url": "data:image/jpeg;base64,…"}')
    if isinstance(url, str) and (is_data_uri(url) or is_url(url)):
        return image_or_url(url, where)
    raise InvalidOption(where, "be a data URI with base64, as in data:image/jpeg;base64,…, or an http(s) URL")


def text_of(value: Any, where: str) -> str:
    """Returns a text member. Raises InvalidOption for other values. ``where``: the member's name in the error."""
    if not isinstance(value, str):
        raise InvalidOption(where, "be text")
    return value
