"""Reads the messages of a chat: the image to caption, and what is said beside it.

Chat clients send whole conversations: a system message, replies, earlier images, a question about the last one. A
captioner takes no instructions, so by default the last image is captioned, and the rest is ignored and named. With
`--chat-text continue` there is one message, whose text is the beginning of the caption. A model with a chat
template does take instructions: the last text that a user has sent is one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.service.api.bodies.base64_text import is_data_uri
from snapcap.service.api.bodies.json_body import image_from_base64
from snapcap.service.errors import InvalidOption, MissingImage, TooManyImages

USER = "user"
# Whose messages hold no image to caption, by the name under which a reply says that they were ignored.
OTHER_ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "assistant": "replies",
    "tool": "replies",
    "function": "replies",
}
DETAILS = ("auto", "low", "high")
_NO_IMAGE = "There is no image; send one as a content part of type image_url with a data URI."


@dataclass(frozen=True)
class Conversation:
    """`image` is the bytes of a data URI, or an http(s) URL; `text` the beginning of the caption or an instruction.
    `ignored` names what the messages hold beside both: text, system, replies, images."""

    image: bytes | str
    text: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class _UserMessage:
    """`images`: each URL with the place where it stands."""

    texts: Sequence[str]
    images: Sequence[tuple[str, str]]


def read_messages(messages: Any, *, continue_text: bool, instruct: bool = False) -> Conversation:
    """What the messages ask for. `continue_text`: the text of the only one is the beginning of the caption.
    `instruct`: the last text of a user is an instruction.

    Raises InvalidOption, MissingImage, TooManyImages, UnprocessableImage."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidOption("messages", "be a list of messages")
    return _only_message(messages) if continue_text and not instruct else _last_image(messages, instruct)


def _last_image(messages: list[dict[str, Any]], instruct: bool) -> Conversation:
    ignored: set[str] = set()
    asked: _UserMessage | None = None
    said = ""
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == USER:
            found = _user_message(message, f"messages[{index}]")
            text = "".join(found.texts)
            if text.strip():
                ignored |= {"text"} if said or not instruct else set()
                said = text
            if found.images:
                ignored |= set() if asked is None else {"images"}
                asked = found
        elif isinstance(role, str) and role in OTHER_ROLES:
            ignored.add(OTHER_ROLES[role])
        else:
            raise InvalidOption(f"messages[{index}].role", f"be {', '.join((USER, *OTHER_ROLES))}")
    if asked is None:
        raise MissingImage(_NO_IMAGE)
    return Conversation(_one_image(asked.images), said if instruct else "", tuple(sorted(ignored)))


def _only_message(messages: list[dict[str, Any]]) -> Conversation:
    if len(messages) != 1:
        raise InvalidOption("messages", "be a list of one message; a caption has no conversation before it")
    if messages[0].get("role") != USER:
        raise InvalidOption("messages[0].role", "be 'user'; this model takes no instructions")
    found = _user_message(messages[0], "messages[0]")
    image = _one_image(found.images)
    if len(found.texts) > 1:
        raise InvalidOption("messages[0].content", "have one text part at most: the beginning of the caption")
    return Conversation(image, "".join(found.texts))


def _user_message(message: Mapping[str, Any], where: str) -> _UserMessage:
    if set(message) - {"role", "content", "name"} or not isinstance(message.get("name"), str | None):
        raise InvalidOption(where, "have the members role and content, and as name a text")
    content = message.get("content")
    if isinstance(content, str):
        return _UserMessage([content], [])
    if not isinstance(content, list):
        raise InvalidOption(f"{where}.content", "be text or a list of content parts")
    images, texts = [], []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image_url"):
            raise InvalidOption(place, "be a content part of type text or image_url")
        if set(part) - {"type", kind}:
            raise InvalidOption(place, f"have the members type and {kind} only")
        if kind == "image_url":
            images.append(_image_url(part.get("image_url"), f"{place}.image_url"))
        else:
            texts.append(text_of(part.get("text"), f"{place}.text"))
    return _UserMessage(texts, images)


def _image_url(value: Any, where: str) -> tuple[str, str]:
    if isinstance(value, str):  # as some clients have it
        return value, where
    if not isinstance(value, dict) or set(value) - {"url", "detail"}:
        raise InvalidOption(where, 'be an object such as {"url": "data:image/jpeg;base64,…"}')
    if value.get("detail") not in (None, *DETAILS):
        raise InvalidOption(f"{where}.detail", f"be {', '.join(DETAILS)}")
    return text_of(value.get("url"), f"{where}.url"), f"{where}.url"


def _one_image(images: Sequence[tuple[str, str]]) -> bytes | str:
    if not images:
        raise MissingImage(_NO_IMAGE)
    if len(images) > 1:
        raise TooManyImages(f"There are {len(images)} images in a message; send one in each.")
    ((url, where),) = images
    if is_data_uri(url):
        return image_from_base64(url, where)
    if url.lower().startswith(("http://", "https://")):
        return url
    raise InvalidOption(where, "be a data URI with base64, as in data:image/jpeg;base64,…")


def text_of(value: Any, where: str) -> str:
    """The text that a member is. Raises InvalidOption, which names it ``where``."""
    if not isinstance(value, str):
        raise InvalidOption(where, "be text")
    return value
