"""Reads the messages of a chat: the image to caption, and the text that belongs to it.

Chat clients send whole conversations: a system message, replies, earlier images, a question about the last image.
Most models take no instructions. For them the newest image of any role is captioned; the rest is ignored, and the
reply names it. With `--chat-text continue` there must be one message, and its text is the beginning of the caption.
A model with a chat template takes instructions: the last text of a user is the instruction.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.service.api.bodies.base64_text import is_data_uri
from snapcap.service.api.bodies.json_body import image_from_base64
from snapcap.service.errors import InvalidOption, MissingImage, TooManyImages

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
_NO_IMAGE = "There is no image; send one as a content part of type image_url with a data URI."


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
        raise InvalidOption("messages", "be a list of one message; a caption has no conversation before it")
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
        raise TooManyImages(f"There are {len(images)} images in a message; send one in each.")
    ((part, where),) = images
    if part["type"] not in IMAGES:
        raise InvalidOption(where, _PARTS)
    url, where = part.get(IMAGES[0]), f"{where}.{IMAGES[0]}"
    if isinstance(url, dict):
        url, where = url.get("url"), f"{where}.url"
    if not isinstance(url, str):
        raise InvalidOption(where, 'be an object such as {"url": "data:image/jpeg;base64,…"}')
    if is_data_uri(url):
        return image_from_base64(url, where)
    if url.lstrip()[:8].lower().startswith(("http://", "https://")):
        return url
    raise InvalidOption(where, "be a data URI with base64, as in data:image/jpeg;base64,…")


def text_of(value: Any, where: str) -> str:
    """Returns a text member. Raises InvalidOption for other values. ``where``: the member's name in the error."""
    if not isinstance(value, str):
        raise InvalidOption(where, "be text")
    return value
