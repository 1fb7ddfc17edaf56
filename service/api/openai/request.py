"""Parses an OpenAI chat completion request into a caption request: one image, options, and stop sequences."""

from collections.abc import Mapping
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.service.api.bodies.json_body import json_object
from snapcap.service.api.openai.messages import read_messages, text_of
from snapcap.service.captioning import options
from snapcap.service.captioning.options import CaptionOptions, options_from_json, sort_fields
from snapcap.service.errors import InvalidOption

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
            raise InvalidOption("prompt", "be left out where the message has a text, which is one")
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
    stops = [value] if isinstance(value, str) else value
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
