"""Reads the messages of a chat: finds the image to caption, and the text that a model can use.

Chat clients send whole conversations: a system message, replies, earlier images, a question about the last image.
Most models take no instructions. For them the newest image of any role is captioned, the last of its message; the
rest is ignored, and the reply names it. With `--chat-text continue` there must be one message, and its text is the
beginning of the caption. A model with a chat template takes instructions: the last text of a user is the
instruction. If the model reads conversations, the other messages stand around the message with the image, as its
template renders them. A text before the image of its message keeps its place, if the model can read it there.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

from snapcap.models.dataclass import dataclass
from snapcap.models.text import ASSISTANT, SYSTEM, USER, Dialogue
from snapcap.service.errors import InvalidOption, MissingImage
from snapcap.service.http.bodies import image_or_url
from snapcap.service.http.json_text import is_data_uri, is_url

# Roles whose texts are ignored, each with the name of the texts in X-Snapcap-Ignored.
OTHER_ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "assistant": "replies",
    "tool": "replies",
    "function": "replies",
}
# Types of content parts of OpenAI's chats and of its Responses API; some clients use the latter in chats too.
IMAGES = ("image_url", "input_image")
TEXTS = ("text", "input_text")
_PARTS = f"be a content part of type {TEXTS[0]} or {IMAGES[0]}"
_NO_IMAGE = (
    "The messages have no image; send one as a content part of type image_url with a data URI, or in Ollama's API "
    "as base64 in images."
)


class TextUse(Enum):
    """The use of the texts in messages. IGNORE: none. CONTINUE: there must be one message, and its text is the
    beginning of the caption. INSTRUCT: the last text of a user is an instruction. CONVERSE: likewise, and the model
    reads the other messages too."""

    IGNORE, CONTINUE, INSTRUCT, CONVERSE = range(4)


@dataclass(frozen=True)
class Conversation:
    """Holds the parsed messages. `image`: the bytes of a data URI, or an http(s) URL. `text`: the beginning of the
    caption, or an instruction. `ignored`: names of the ignored parts: text, system, replies, images. `around`: the
    text before the image, and the other messages for a model that reads them."""

    image: bytes | str
    text: str = ""
    ignored: tuple[str, ...] = ()
    around: Dialogue = Dialogue()


@dataclass(frozen=True)
class Message:
    """Holds the content of one message. `images`: a function for each part that is or may be an image, which
    returns its bytes or its URL. `texts`: the texts of all other parts; for roles other than the user, parts
    without a text give empty texts. `leading`: number of texts before the last image."""

    texts: Sequence[str]
    images: Sequence[Callable[[], bytes | str]]
    leading: int = 0

    @property
    def lead(self) -> str:
        """The text before the last image."""
        return "".join(self.texts[: self.leading])

    @property
    def text(self) -> str:
        """The text behind the last image, or the whole text of a message without images."""
        return "".join(self.texts[self.leading :])


# Returns the texts and images of a message. Arguments: the message, and its place for errors.
ReadMessage: TypeAlias = Callable[[Mapping[str, Any], str], Message]


def read_message(message: Mapping[str, Any], where: str) -> Message:
    """Returns the texts and images of a message of OpenAI's APIs. In a user's message, each part must be a text or
    an image; a null counts as an empty text.

    Any part that may be an image counts as an image. Otherwise an older image would be captioned in its place."""
    images: list[Callable[[], bytes | str]] = []
    texts: list[str] = []
    leading = 0
    content, strict = message.get("content"), message.get("role") == USER
    if isinstance(content, str):
        texts.append(content)
    elif strict and content is not None and not isinstance(content, list):
        raise InvalidOption(f"{where}.content", "be text or a list of content parts")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, str):
            texts.append(part)
            continue
        place = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and ("image" in kind or "video" in kind):
            images.append(partial(_image_of, part, place))
            leading = len(texts)
        elif not strict:
            text = part.get("text") if isinstance(part, dict) else None
            texts.append(text if isinstance(text, str) else "")
        elif kind in TEXTS and part.get(IMAGES[0]) is None:
            text = part.get("text")
            texts.append("" if text is None else text_of(text, f"{place}.text"))
        else:
            raise InvalidOption(place, _PARTS)
    if message.get("images"):  # some servers put the images of a reply here
        images.append(partial(_image_of, {"type": "images"}, f"{where}.images"))
    return Message(texts, images, leading)


def read_messages(
    messages: Any, use: TextUse, read: ReadMessage = read_message, where: str = "messages"
) -> Conversation:
    """Returns the parsed messages. `read`: reads one message. `where`: the name of the messages for errors.

    Raises InvalidOption, MissingImage, UnprocessableImage."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidOption(where, "be a list of messages")
    if use is TextUse.CONTINUE:
        return _only_message(messages, read, where)
    return _newest_image(messages, use, read, where)


def _newest_image(messages: list[dict[str, Any]], use: TextUse, read: ReadMessage, where: str) -> Conversation:
    turns = [_turn(message, read, f"{where}[{index}]") for index, message in enumerate(messages)]
    with_image = [index for index, (_, message) in enumerate(turns) if message.images]
    if not with_image:
        raise MissingImage(_NO_IMAGE)
    place = with_image[-1]
    role_of_image, asked = turns[place]
    image = _last(asked.images)
    ignored = {"images"} if len(with_image) > 1 or len(asked.images) > 1 else set[str]()
    if use is TextUse.CONVERSE and role_of_image == USER:
        return _among_others(image, turns, place, ignored)
    ignored |= {OTHER_ROLES[role] for role, each in turns if role != USER and (each.texts or not each.images)}
    said = [message for role, message in turns if role == USER and "".join(message.texts).strip()]
    instruction = said[-1] if said and use is not TextUse.IGNORE else Message((), ())
    if said and (said[:-1] or use is TextUse.IGNORE):
        ignored.add("text")
    names = tuple(sorted(ignored))
    if instruction is asked:
        return Conversation(image, asked.text, names, Dialogue(lead=asked.lead))
    return Conversation(image, "".join(instruction.texts), names)


def _turn(message: dict[str, Any], read: ReadMessage, where: str) -> tuple[str, Message]:
    """Returns the role of a message, and its texts and images."""
    role = message.get("role")
    if not isinstance(role, str) or role not in (USER, *OTHER_ROLES):
        raise InvalidOption(f"{where}.role", f"be {', '.join((USER, *OTHER_ROLES))}")
    return role, read(message, where)


def _among_others(
    image: bytes | str, messages: Sequence[tuple[str, Message]], place: int, ignored: set[str]
) -> Conversation:
    """Returns the conversation of a model that reads the messages before and behind the one with the image, which
    is at `place`. A template renders a system message only if it is the first."""
    texts = ["".join(message.texts) for _, message in messages]
    parts: tuple[list[tuple[str, str]], list[tuple[str, str]]] = [], []
    for index, ((role, message), text) in enumerate(zip(messages, texts, strict=True)):
        if index == place or not message.texts:
            continue
        if role in (USER, ASSISTANT):
            parts[index > place].append((role, text))
        elif index == 0 and OTHER_ROLES[role] == SYSTEM:
            parts[0].append((SYSTEM, text))
        else:
            ignored = {*ignored, OTHER_ROLES[role]}
    before, after = (tuple(each) for each in parts)
    asked = messages[place][1]
    return Conversation(image, asked.text, tuple(sorted(ignored)), Dialogue(before, after, asked.lead))


def _only_message(messages: list[dict[str, Any]], read: ReadMessage, where: str) -> Conversation:
    if len(messages) != 1:
        raise InvalidOption(where, "be a list of one message; this server continues the text of a single message")
    if messages[0].get("role") != USER:
        raise InvalidOption(f"{where}[0].role", "be 'user'; this model takes no instructions")
    found = read(messages[0], f"{where}[0]")
    if not found.images:
        raise MissingImage(_NO_IMAGE)
    if len(found.texts) > 1:
        raise InvalidOption(f"{where}[0].content", "have one text part at most: the beginning of the caption")
    ignored = ("images",) if len(found.images) > 1 else ()
    return Conversation(_last(found.images), "".join(found.texts), ignored)


def _last(images: Sequence[Callable[[], bytes | str]]) -> bytes | str:
    """Returns the bytes or the URL of the last image of a message. Raises the error of any of them: an image that
    cannot be read may be the one that was meant."""
    *_, image = (read() for read in images)
    return image


def _image_of(part: Mapping[str, Any], where: str) -> bytes | str:
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
