"""Serves Ollama's API: captions by /api/generate and /api/chat, and the list and the state of the models.

A reply is a stream of JSON lines unless the request has `stream: false`. The text of a request is read as the text
of a chat message (`conversation.py`).
"""

import json
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from snapcap.models.dataclass import dataclass
from snapcap.models.text import SYSTEM, USER
from snapcap.service.api.answers import (
    Answers,
    ChatFields,
    ChatRequest,
    Member,
    answer_member,
    caption_options,
    chat_fields,
    schema_member,
    stops,
    switch,
    usage_of,
)
from snapcap.service.api.conversation import Conversation, Message, TextUse, read_messages, text_of
from snapcap.service.captioning import options
from snapcap.service.captioning.captioner import LATEST
from snapcap.service.captioning.model_defaults import regions_member
from snapcap.service.captioning.options import EMPTY, NEUTRAL, integer, sort_fields
from snapcap.service.captioning.stream import CaptionStream
from snapcap.service.errors import InvalidOption
from snapcap.service.http.bodies import image_from_base64, json_object, member_object
from snapcap.service.http.problems import SENTENCE
from snapcap.service.http.replies import JsonReply, LineStream, ignored_header, unless_disconnected
from snapcap.service.http.routing import Api, RouteGroup
from snapcap.warmup.progress.status import StartupStatus

# The version of Ollama whose API this is. Clients compare it with the version that they need.
VERSION = "0.9.0"
# The option that each field of `options` gives. A later field overrides an earlier one of the same option.
OPTIONS: Mapping[str, str] = {
    field: name for name, each in options.OPTIONS.items() for field in (each.ollama, name) if field
}
# The fields of POST /api/generate alone, and of POST /api/chat alone.
GENERATE = ("prompt", "images", "system")
CHAT = ("messages",)
# Fields of both requests. `think` changes nothing if it is false.
FIELDS = ("model", "options", "stream", "keep_alive", "format")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {**NEUTRAL, "think": (False,)}
# Clients send these options of Ollama with values that they chose for no model, so they are ignored.
IGNORED_OPTIONS = ("frequency_penalty", "presence_penalty", "min_p", "typical_p")
_NEUTRAL_OPTIONS = {name: values for name, values in NEUTRAL.items() if name not in IGNORED_OPTIONS}
# Values of num_predict that mean any number of tokens.
_NO_BOUND = (0, -1, -2)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"([0-9]{1,12}(?:\.[0-9]{0,9})?)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"(-?)((?:{_PART}){{1,7}})")
_MOST_KEEP_S = 1e12  # a longer keep_alive has no end; the event loop's clock counts no longer ones
_LAST = 253402300799.0  # the last moment that RFC 3339 can name, at which a model leaves that stays
_Shape = Callable[[str], dict[str, Any]]
_EXAMPLE = '{"model": "…", "images": ["…base64…"]}'


@dataclass(frozen=True)
class OllamaRequest:
    """Holds a parsed request. `chat` None: the request has no image and no text, and only loads the model, or
    unloads it. `keep_alive`: seconds, or None if the request has none."""

    model: str
    chat: ChatRequest | None
    keep_alive: float | None


class OllamaRoutes:
    """Serves the endpoints of the API for one captioner."""

    def __init__(self, answers: Answers, status: StartupStatus) -> None:
        """`status`: of the server's start, which is the model's start if the server has one model."""
        self._answers = answers
        self._status = status
        self._captioner = answers.captioner

    def group(self) -> RouteGroup:
        routes = [
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/tags", self.tags),
            Route("/api/ps", self.ps),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/version", self.version),
        ]
        return RouteGroup("Ollama", routes, Api("ollama", SENTENCE, captions=True))

    async def generate(self, request: Request) -> Response:
        """Captions the image in `images`. The reply is a stream of JSON lines unless `stream` is false.

        For a model that takes instructions, `prompt` is the instruction; otherwise `prompt` is ignored, or with
        `--chat-text continue` is the beginning of the caption. `system` is read as a system message of a chat is.
        A request without a prompt and images loads the model, or unloads it if `keep_alive` is 0. Unknown options
        are ignored, and X-Snapcap-Ignored names them."""
        return await self._answer(request, GENERATE, lambda text: {"response": text})

    async def chat(self, request: Request) -> Response:
        """Captions the newest image in the messages. The reply is a stream of JSON lines unless `stream` is false.

        Texts are read as in POST /v1/chat/completions. A request without messages loads the model, or unloads it if
        `keep_alive` is 0."""
        return await self._answer(request, CHAT, lambda text: {"message": {"role": "assistant", "content": text}})

    async def tags(self, request: Request) -> Response:
        """Lists the models. Size and digest are of the files with the weights, and zeros if this machine has
        none."""
        models = []
        for name in self._captioner.models or [""]:
            served, created = self._served(name)
            models.append({**self._described(self._tagged(served)), "modified_at": _moment(created)})
        return JsonReply({"models": models})

    async def ps(self, request: Request) -> Response:
        """Lists the loaded models, with the time at which each leaves if it gets no further request."""
        loaded = []
        for name in self._captioner.models or [""]:
            served, _ = self._served(name)
            keeper, leaves, status = self._captioner.named(served).keeper, math.inf, self._status
            if keeper is not None:
                if keeper.state != "ready":
                    continue
                leaves, status = keeper.leaves_s, keeper.start.status
            described = self._described(self._tagged(served))
            on_gpu = str(status.to_dict()["device"]).startswith("cuda")
            more = {"expires_at": _moment(time.time() + leaves), "size_vram": described["size"] if on_gpu else 0}
            loaded.append({**described, **more})
        return JsonReply({"models": loaded})

    async def show(self, request: Request) -> Response:
        """Describes a model."""
        asked = await self._answers.read(request, sort_show, lambda fields, _: fields.model)
        _, created = self._served(asked)
        family = self._captioner.named(asked).known.family or ""
        capabilities = ["completion", "vision"]
        texts = dict.fromkeys(("license", "modelfile", "parameters", "template"), "")
        described = {"details": self._details(asked), "model_info": {"general.architecture": family}}
        return JsonReply({**texts, **described, "capabilities": capabilities, "modified_at": _moment(created)})

    async def version(self, request: Request) -> Response:
        """Returns the version of Ollama whose API this is."""
        return JsonReply({"version": VERSION})

    async def _answer(self, request: Request, own: tuple[str, ...], shape: _Shape) -> Response:
        """Answers a request. `own`: its own members. `shape`: returns the member that holds a text."""
        with self._captioner.admit() as permit, ExitStack() as afterwards:
            wanted = await self._answers.read(request, partial(sort_ollama, own), partial(read_ollama, own), permit)
            name, _ = self._served(wanted.model)
            captioner, chat, seconds = self._captioner.named(wanted.model), wanted.chat, wanted.keep_alive
            if captioner.keeper is not None and seconds is not None:
                afterwards.callback(captioner.keeper.keep, seconds)
            if chat is None:
                unloads = captioner.keeper is not None and seconds == 0
                if not unloads:
                    await unless_disconnected(request.receive, captioner.awake())
                reason = "unload" if unloads else "load"
                return JsonReply({**_line(name, shape("")), "done": True, "done_reason": reason})
            if chat.stream:
                lines = partial(self._lines, request, name, shape, chat)
                return await self._answers.streamed(request, chat, permit, lines, LineStream)
            stream, text = await self._answers.whole(request, chat, permit)
        last = {**_line(name, shape(text)), **_end(stream), **self._answers.warnings(chat, stream)}
        return JsonReply(last, ignored_header(chat.options.ignored))

    async def _lines(
        self,
        request: Request,
        name: str,
        shape: _Shape,
        chat: ChatRequest,
        stream: CaptionStream,
        pieces: AsyncIterator[str],
    ) -> AsyncGenerator[str, None]:
        try:
            async for piece in pieces:
                yield json.dumps({**_line(name, shape(piece)), "done": False})
        except Exception as error:
            yield json.dumps({"error": self._answers.handler.note(request, error).detail})
            return
        yield json.dumps({**_line(name, shape("")), **_end(stream), **self._answers.warnings(chat, stream)})

    def _served(self, asked: str) -> tuple[str, float]:
        """Returns the name of the model, as the client spells it or with its tag if `asked` is "", and the Unix
        time since which the model is served. Raises NotReady, ModelNotFound."""
        found = self._captioner.served(asked)
        return asked or self._tagged(str(found.model_name)), found.created

    def _tagged(self, name: str) -> str:
        return name if ":" in name.rpartition("/")[2] else f"{name}{LATEST}"

    def _described(self, name: str) -> dict[str, Any]:
        size, digest = self._captioner.named(name).files
        return {"name": name, "model": name, "size": size, "digest": digest, "details": self._details(name)}

    def _details(self, name: str) -> dict[str, Any]:
        family = self._captioner.named(name).known.family or ""
        texts = dict.fromkeys(("parent_model", "format", "parameter_size", "quantization_level"), "")
        return {**texts, "family": family, "families": [family] if family else []}


def sort_show(body: bytes) -> ChatFields:
    """Returns the model that the body of POST /api/show names. Raises InvalidJson, InvalidOption."""
    document = json_object(body, '{"model": "…"}')
    return ChatFields(document, text_of(document.get("model") or document.get("name"), "model"), ())


def parse_keep_alive(value: Any) -> float | None:
    """Returns the seconds of a `keep_alive`: a number of seconds, or a duration such as "5m" or "1h30m". A negative
    value is infinity. None, and "", mean that it is not given.

    Raises InvalidOption."""
    if value in (None, ""):
        return None
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if 0 <= value <= _MOST_KEEP_S else math.inf
    elif isinstance(value, str) and len(value) <= 100:
        if duration := _DURATION.fullmatch(value):
            parts = re.findall(_PART, duration[2])
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts) * (-1 if duration[1] else 1)
        elif re.fullmatch(r"-?[0-9]{1,12}", value):
            seconds = float(value)
    if seconds is None:
        raise InvalidOption("keep_alive", 'be a number of seconds, or a duration such as "5m"')
    return seconds if 0 <= seconds <= _MOST_KEEP_S else math.inf


def sort_ollama(own: tuple[str, ...], body: bytes) -> ChatFields:
    """Returns the members of a request. `own`: GENERATE or CHAT. Raises BadRequest."""
    fields = chat_fields(body, _EXAMPLE, (*FIELDS, *own), (*OPTIONS, "stop"), "options", _NEUTRAL)
    if own is CHAT:
        return fields._replace(empty=fields.document.get("messages") in (None, []))
    said = _read_prompt(fields.document, "")
    return fields._replace(empty=not (said.texts or said.images))


def read_ollama(own: tuple[str, ...], fields: ChatFields, use: TextUse) -> OllamaRequest:
    """Returns the parsed request. `own`: GENERATE or CHAT. Raises BadRequest, with the field as `option`."""
    document = fields.document
    within = sort_fields(
        member_object(document.get("options"), "options").items(),
        (*OPTIONS, "stop"),
        (*OPTIONS, "stop"),
        neutral=_NEUTRAL_OPTIONS,
    )
    values = dict(within.known)
    if integer(values.get("num_predict")) in _NO_BOUND:
        del values["num_predict"]
    stream = switch(document, "stream", default=True)
    member = _member(document.get("format"))
    messages, read, unread = document.get("messages"), _read_message, list[str]()
    if own is GENERATE:
        messages, read = [{**document, "role": USER}], _read_prompt
        if system := text_of(document.get("system", ""), "system"):
            if use is TextUse.CONTINUE:  # reads a single message
                unread.append(SYSTEM)
            else:
                messages.insert(0, {"role": SYSTEM, "prompt": system})
    asked = Conversation(b"") if fields.empty else read_messages(messages, use, read)
    chat = ChatRequest(
        asked.image,
        caption_options(fields, values, OPTIONS, asked, member, own[0]).ignoring(*unread, *within.ignored),
        stops(values.get("stop", []), "options.stop"),
        stream,
        member,
    )
    return OllamaRequest(fields.model, None if fields.empty else chat, parse_keep_alive(document.get("keep_alive")))


def _read_message(message: Mapping[str, Any], where: str) -> Message:
    return _message(message, "content", f"{where}.")


def _read_prompt(message: Mapping[str, Any], where: str) -> Message:
    return _message(message, "prompt", "")


def _message(members: Mapping[str, Any], name: str, where: str) -> Message:
    """Returns the text of the member `name`, and the images in base64 of the member `images`. `where`: the text
    before the members' names in errors."""
    text, images = members.get(name), members.get("images")
    if text is not None and not isinstance(text, str):
        raise InvalidOption(f"{where}{name}", "be text; images stand in the member images")
    if images is not None and not isinstance(images, list):
        raise InvalidOption(f"{where}images", "be a list of images in base64")
    places = enumerate(images or ())
    return Message(
        [text] if text else [],
        [partial(image_from_base64, image, f"{where}images[{index}]") for index, image in places],
    )


def _member(form: Any) -> Member | None:
    """Returns the member of the JSON object that `format` asks for: "json", or a schema. Raises
    UnsupportedOption."""
    if form in (None, *EMPTY):
        return None
    return answer_member({"type": "json_object"}, "format") if form == "json" else schema_member(form, "format")


def _line(name: str, text: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": name, "created_at": _moment(time.time()), **text}


def _end(stream: CaptionStream) -> dict[str, Any]:
    """Returns the members of the last line: the reason of the end, and the counts and times in nanoseconds."""
    stream.spent()  # takes over the times of the engine, which reports none if a stop sequence ended the caption
    times, now = stream.times, time.monotonic()
    prompt, completion = usage_of(stream)
    decode = times.decode_s or (now - times.admitted if times.admitted else 0.0)
    return {
        "done": True,
        "done_reason": stream.finish_reason,
        "total_duration": _nanoseconds(now - times.started),
        "load_duration": _nanoseconds(times.wake_s),
        "prompt_eval_count": prompt,
        "prompt_eval_duration": _nanoseconds(times.image_s + times.encode_s),
        "eval_count": completion,
        "eval_duration": _nanoseconds(decode),
        **regions_member(stream.answer.regions),
    }


def _nanoseconds(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e9)


def _moment(seconds: float) -> str:
    """Returns a Unix time as text of RFC 3339."""
    return datetime.fromtimestamp(min(seconds, _LAST), UTC).isoformat().replace("+00:00", "Z")
