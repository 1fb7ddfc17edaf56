"""Answers requests: the code that all APIs share, and for chats the code from the parsed request to the text.

A caption can be the only text of a JSON object, so a request may ask for such an object: as `json_object`, whose
member is then `caption`, or by a schema that one text meets. The decoder is not constrained, so no other schema is
served.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from snapcap.models.dataclass import dataclass
from snapcap.service.api.conversation import OTHER_ROLES, Conversation, TextUse, text_of
from snapcap.service.api.image_fetcher import ImageFetcher
from snapcap.service.captioning.captioner import Captioner, CaptionJob, CaptionResult, ModelFacts
from snapcap.service.captioning.options import EMPTY, NEUTRAL, CaptionOptions, options_from_json, sort_fields
from snapcap.service.captioning.stream import CaptionStream, begun
from snapcap.service.engine.admission import Permit
from snapcap.service.errors import InvalidOption, UnsupportedMediaType, UnsupportedOption
from snapcap.service.http.bodies import (
    JSON,
    UNTYPED,
    BodyLimits,
    is_json,
    json_object,
    media_type,
    parse_received,
    read_json,
)
from snapcap.service.http.middleware import ProblemHandler, new_caption
from snapcap.service.http.replies import (
    EventStream,
    RawHeaders,
    ignored_header,
    ignored_names,
    unless_disconnected,
)
from snapcap.service.memory import body_account

T = TypeVar("T")
# Returns the image, or its URL, and the options of a request.
Read = Callable[[Request, BodyLimits], Awaitable[tuple[bytes | str, CaptionOptions]]]
MAX_STOPS = 16  # OpenAI takes 4, other servers any number
MAX_STOP_CHARACTERS = 1000
# Fields that label a request for its sender. They change no caption, so a reply does not name them as ignored.
LABELS = ("user", "metadata")
MAX_MEMBER_CHARACTERS = 64
_ONE_TEXT = (
    "a caption cannot be constrained to a schema; ask for text, for json_object, or for a schema of an object with "
    "one required member, of type string and with no other rule than maxLength"
)
# Keywords of a schema: those without an effect on validation, and those allowed for the object and for its text.
_NOTES = {"title", "description", "default", "examples", "$schema", "$defs"}
_OBJECT_RULES = {"type", "properties", "required", "additionalProperties", *_NOTES}
_TEXT_RULES = {"type", "maxLength", *_NOTES}


class Member(NamedTuple):
    """Names the member of a JSON object that is the whole answer. `max_chars`: the most characters of its text, or
    None."""

    name: str
    max_chars: Any = None


class ChatFields(NamedTuple):
    """Holds the members of a request. `model`: the name that it has, or "" for the served model. `ignored`: names
    of the ignored members. `empty`: the request has nothing to caption."""

    document: dict[str, Any]
    model: str
    ignored: tuple[str, ...]
    empty: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """Holds a parsed request, of a chat or of a streamed caption. `image`: its bytes, or an http(s) URL. `options`:
    has the model, "" for the served model, and the names of the ignored parts of the messages and of the ignored
    fields. `member`: the answer is a JSON object with this member. `metadata`: labels that the reply repeats."""

    image: bytes | str
    options: CaptionOptions
    stop: tuple[str, ...]
    stream: bool
    member: Member | None = None
    include_usage: bool = False
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Answers:
    """Captions the images of requests to all APIs, whole or as a stream, with one captioner. `limits`: the limits
    of request bodies. `continue_text`: texts for a model that takes no instructions are beginnings of captions."""

    captioner: Captioner
    limits: BodyLimits
    fetcher: ImageFetcher
    handler: ProblemHandler
    continue_text: bool = False

    async def caption(self, request: Request, read: Read, model: str = "") -> tuple[CaptionResult, RawHeaders]:
        """Captions the image that `read` returns for a request. `model`: the model if the request names none; "":
        the first. Returns the result and the headers of the reply."""
        with self.captioner.admit() as permit:
            image, options = await read(request, self.limits)
            options = replace(options, model=options.model or model)
            result = await unless_disconnected(request.receive, self._caption(request, image, options, permit))
        return result, ignored_header(options.ignored)

    async def read(
        self,
        request: Request,
        sort: Callable[[bytes], ChatFields],
        parse: Callable[[ChatFields, TextUse], T],
        permit: Permit | None = None,
    ) -> T:
        """Returns the parsed request. `sort`: returns the members of a JSON body. `parse`: parses the members. The
        server learns whether a model takes instructions when the model is awake for the first time: with `permit`,
        the first request waits until the model is awake, and then has a place in the model's queue.

        Raises UnsupportedMediaType and the errors of `read_json`, `sort`, `parse`, `Captioner.named` and
        `Captioner.awake`."""
        kind = media_type(request)
        if not is_json(kind) and kind not in UNTYPED:
            raise UnsupportedMediaType(f"Send {JSON}.")
        unread: list[tuple[bytes, Captioner]] = []  # the body, if it is parsed once its captioner is awake

        def read_now(body: bytes) -> T | None:
            fields = sort(body)
            captioner = self.captioner.named(fields.model)
            if captioner.facts is None and permit is not None and not (unread or fields.empty):
                unread.append((body, captioner))
                return None
            return parse(fields, self._use(captioner.known))

        wanted = await read_json(request, self.limits, read_now)
        if unread and permit is not None:
            body, captioner = unread[0]
            captioner.take(permit)
            times = new_caption(request.scope, permit).times
            await unless_disconnected(request.receive, captioner.awake(times))
            wanted = await parse_received(request, self.limits, body, read_now)
        return cast(T, wanted)

    def _use(self, known: ModelFacts) -> TextUse:
        if known.takes_conversations:
            return TextUse.CONVERSE
        if known.takes_instructions:
            return TextUse.INSTRUCT
        return TextUse.CONTINUE if self.continue_text else TextUse.IGNORE

    async def whole(self, request: Request, chat: ChatRequest, permit: Permit) -> tuple[CaptionStream, str]:
        """Returns the stream at its end, and the whole text."""
        return await unless_disconnected(request.receive, self._whole(request, chat, permit))

    async def streamed(
        self,
        request: Request,
        chat: ChatRequest,
        permit: Permit,
        events: Callable[[CaptionStream, AsyncIterator[str]], AsyncGenerator[str, None]],
        kind: type[EventStream] = EventStream,
    ) -> Response:
        """Returns the reply that sends `events`, which gets the stream and the pieces of the text.

        The reply starts with the first text, so that an error before it still gets its status."""
        stream, first = await unless_disconnected(request.receive, begun(self._open(request, chat, permit)))
        pieces = _pieces(stream, first, chat.member)
        note = partial(self.handler.note, request)
        return kind(events(stream, pieces), stream.close, note, ignored_header(chat.options.ignored))

    def warnings(self, chat: ChatRequest, stream: CaptionStream) -> dict[str, list[str]]:
        """Returns the member that tells the user of a chat what was ignored or moved; {} if nothing was."""
        sentences = [stream.warning] if stream.warning else []
        if ignored := chat.options.ignored:
            said = not {"text", *OTHER_ROLES.values()}.isdisjoint(ignored)
            useless = said and not self.captioner.named(chat.options.model).known.takes_instructions
            why = " This model takes no instructions or questions." if useless else ""
            sentences.insert(0, f"Ignored: {ignored_names(ignored)}.{why}")
        return {"warnings": sentences} if sentences else {}

    async def _open(self, request: Request, chat: ChatRequest, permit: Permit) -> CaptionStream:
        captioner, image, job = await self._arrived(request, chat.image, chat.options, permit)
        return await captioner.stream(image, chat.options, job, chat.stop, live=chat.stream)

    async def _whole(self, request: Request, chat: ChatRequest, permit: Permit) -> tuple[CaptionStream, str]:
        stream = await self._open(request, chat, permit)
        try:
            first = await anext(stream, None)
            return stream, "".join([piece async for piece in _pieces(stream, first, chat.member)])
        finally:
            stream.close()

    async def _caption(
        self, request: Request, image: bytes | str, options: CaptionOptions, permit: Permit
    ) -> CaptionResult:
        captioner, data, job = await self._arrived(request, image, options, permit)
        return await captioner.caption(data, options, job)

    async def _arrived(
        self, request: Request, image: bytes | str, options: CaptionOptions, permit: Permit
    ) -> tuple[Captioner, bytes, CaptionJob]:
        """Returns the captioner of the model that the options name, and the bytes of an image, which is fetched if
        it is a URL and then has its place in the queue."""
        captioner = self.captioner.named(options.model, permit)
        if isinstance(image, str):
            permit.release()
            image = await self.fetcher.fetch(image, body_account(request.scope))
        if not permit.places:  # a request that has waited for the model's first wake has its place
            permit.take()
        return captioner, image, new_caption(request.scope, permit)


async def _pieces(stream: CaptionStream, piece: str | None, member: Member | None) -> AsyncGenerator[str, None]:
    """Yields the pieces of an answer. `piece`: the first of the caption, or None if the caption is empty."""
    if member is not None:
        yield f'{{{json.dumps(member.name)}: "'
    while piece is not None:
        yield piece if member is None else json.dumps(piece, ensure_ascii=False)[1:-1]
        piece = await anext(stream, None)
    if member is not None:
        yield '"}'


def chat_fields(
    body: bytes,
    example: str,
    known: Collection[str],
    options: Collection[str],
    within: str = "",
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
) -> ChatFields:
    """Returns the members of a JSON body. `example`: a body for the error message. `known`, `options`, `within`,
    `neutral`: see `sort_fields`. Raises BadRequest."""
    fields = sort_fields(json_object(body, example).items(), known, options, within, neutral)
    document = dict(fields.known)
    return ChatFields(document, text_of(document.get("model", ""), "model"), fields.ignored)


def usage_of(stream: CaptionStream) -> tuple[int, int]:
    """Returns the number of tokens of the prompt and of the answer. An image counts as 0 tokens."""
    return len(stream.prompt_ids), len(stream.tokens)


def caption_options(
    fields: ChatFields,
    values: Mapping[str, Any],
    names: Mapping[str, str],
    asked: Conversation,
    member: Member | None,
    where: str,
) -> CaptionOptions:
    """Returns the options of a request, with its model and the names of the ignored members and of the ignored
    parts of the conversation. `values`: the members that have options. `names`: the option of each such member; a
    later member overrides an earlier one of the same option. `where`: the member of the conversation's text.

    Raises InvalidOption and PromptTooLong."""
    options = CaptionOptions(clamp=True, model=fields.model, ignored=(*asked.ignored, *fields.ignored))
    for field, name in names.items():
        if field in values:
            options = _option(name, values[field], field, options)
    if asked.text or asked.around.asks:
        if options.prompt:
            raise InvalidOption("prompt", "be absent if the message has a text, because that text is the prompt")
        options = _option("prompt", asked.text, where, options)
    others = "".join(text for _, text in (*asked.around.before, *asked.around.after))
    # The bound holds for all texts together.
    _option("prompt", f"{others}{asked.around.lead}{asked.text}", where, options)
    options = replace(options, around=asked.around)
    if member is None or member.max_chars is None:
        return options
    most = _option("max_chars", member.max_chars, "maxLength", CaptionOptions()).max_chars
    return replace(options, max_chars=min(filter(None, (most, options.max_chars))))


def _option(name: str, value: Any, field: str, options: CaptionOptions) -> CaptionOptions:
    try:
        return options_from_json({name: value}, options)
    except InvalidOption as error:
        raise InvalidOption(field, error.must) from None


def stops(value: Any, where: str = "stop") -> tuple[str, ...]:
    """Returns the stop sequences: one text, or a list of texts. Raises InvalidOption."""
    texts: Sequence[Any] = [value] if isinstance(value, str) and value else value or []
    if not isinstance(texts, list) or len(texts) > MAX_STOPS:
        raise InvalidOption(where, f"be text or a list of up to {MAX_STOPS} texts")
    for stop in texts:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidOption(where, f"have texts of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(texts)


def switch(values: Mapping[str, Any], name: str, where: str = "", *, default: bool = False) -> bool:
    """Returns a member that is true or false. Raises InvalidOption. `where`: the member's name in the error."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidOption(where or name, "be true or false")
    return default if value is None else bool(value)


def answer_member(form: Any, where: str) -> Member | None:
    """Returns the member of the JSON object that a request asks for, or None if it asks for text. `form`: the value
    of `response_format` in a chat, or of `text.format` in the Responses API. `where`: its name for errors.

    huggingface_hub sends a schema as `value` beside the type `json_object` or `json`, and clients of llama.cpp send
    it as `schema`.

    Raises UnsupportedOption for any other form."""
    kind = form.get("type") if isinstance(form, dict) else None
    if form in (None, *EMPTY) or kind == "text":
        return None
    if kind in ("json_object", "json"):
        schemas = [form[name] for name in ("value", "schema") if form.get(name) not in (None, *EMPTY)]
        return schema_member(schemas[0], where) if schemas else Member("caption")
    if kind == "json_schema":
        around = form.get("json_schema", form)  # the Responses API has no object around the schema
        return schema_member(around.get("schema") if isinstance(around, dict) else None, where)
    raise UnsupportedOption(where, _ONE_TEXT)


def schema_member(schema: Any, where: str) -> Member:
    """Returns the member of an object that meets a schema with one text. Raises UnsupportedOption for a schema that
    needs more than one text, or a text with rules. `where`: the schema's name for errors."""
    if isinstance(schema, dict) and schema.get("type", "object") == "object" and schema.keys() <= _OBJECT_RULES:
        members = schema.get("properties")
        required = schema.get("required") or (list(members) if isinstance(members, dict) else [])
        name = required[0] if isinstance(required, list) and len(required) == 1 else None
        text = members.get(name) if isinstance(members, dict) and isinstance(name, str) else None
        plain = isinstance(text, dict) and text.get("type") == "string" and text.keys() <= _TEXT_RULES
        if isinstance(name, str) and len(name) <= MAX_MEMBER_CHARACTERS and isinstance(text, dict) and plain:
            return Member(name, text.get("maxLength"))
    raise UnsupportedOption(where, _ONE_TEXT)
