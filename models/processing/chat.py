"""Reads a checkpoint's chat template, and tokenizes its messages: its ids once, and then each user's text.

A user's text never contains special tokens. ``<image>`` or the name of an end token in it is tokenized letter by
letter, whereas transformers would take it for the token.
"""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import PromptError, TokenizerFailed
from snapcap.models.fields import ConfigError, is_there, json_or_empty, read_bytes
from snapcap.models.processing.tokenizer import encoded, read_backend, special_tokens
from snapcap.models.text import ASSISTANT, ROLES, SYSTEM, USER, ChatIds, Dialogue, Frame, ImageMarkup, PromptIds

DEFAULT_INSTRUCTION = "Can you describe this image?"
_PROBES = (DEFAULT_INSTRUCTION, "1", "x y\n\nz")


def read_chat(folder: Path, markup: ImageMarkup) -> ChatIds:
    """Returns the ids that a checkpoint's template and tokenizer put around a message. Raises ConfigError if the
    template or the tokenizer is missing, the ids are not the same for all messages, or the tokenizer's library
    fails on the template's text."""
    try:
        return _read_chat(folder, markup)
    except TokenizerFailed as error:
        raise _refused(f"the tokenizer failed at its text ({error.cause})") from None


def _read_chat(folder: Path, markup: ImageMarkup) -> ChatIds:
    backend, _ = read_backend(folder)
    image = _placeholder(backend, markup)
    template = read_template(folder)
    before, found, between = template.before.partition(image)
    if not found or image in between + template.after:
        raise _refused(f"one {image} before the message's text is expected")
    opening, lead = _cut_last(backend, f"{image}{markup.after}{between}")
    trail, closing = _cut_first(backend, template.after)
    (image_id, *opening_ids) = _ids(backend, opening)
    bos = special_tokens(folder).get("bos_token")
    *prefix, last = _with_bos(backend, f"{before}{markup.before}{image}", bos)
    if last != image_id or image_id in (*prefix, *opening_ids):
        raise _refused(f"{image} is no token of its own")
    chat = ChatIds(
        prefix=tuple(prefix),
        start_id=[*opening_ids, *_ids(backend, f"{lead}{DEFAULT_INSTRUCTION}{trail}")][0],
        opening_ids=tuple(opening_ids),
        lead=lead,
        trail=trail,
        closing_ids=tuple(_ids(backend, closing)),
        strips=template.strips,
        image_first=template.image_first,
    )
    whole = {probe: _ids(backend, f"{image}{markup.after}{between}{probe}{template.after}") for probe in _PROBES}
    framed, conversations = None, list[tuple[Dialogue, list[int]]]()
    if markup.reads_ahead and template.frames and chat.opening_ids:
        opened = f"{before.removeprefix(template.frames[_USER_FRAME])}{markup.before}{image}"
        # A text before the image is tokenized up to the first added token, so `opened` must begin with one.
        framed = None if _cut_first(backend, opened)[0] else _with_frames(chat, template, backend, opened)
        for around in _dialogues(template):
            text = template.conversation(_SPACED, around).replace(image, f"{markup.before}{image}{markup.after}")
            conversations.append((around, _with_bos(backend, text, bos)))
    encoder = ChatEncoder(backend, chat)  # changes how the backend reads special tokens
    try:
        separate = all([image_id, chat.start_id, *encoder.ids(probe).ids] == ids for probe, ids in whole.items())
    except PromptError:
        separate = False
    if not separate:
        raise _refused("the tokenizer joins the template's tokens with a message's text")
    if framed is None:
        return chat
    encoder = ChatEncoder(backend, framed)
    for around, whole_ids in conversations:
        ids, ahead, _ = encoder.ids(_SPACED, around)
        if [*ids[:ahead], *framed.prefix, image_id, chat.start_id, *ids[ahead:]] != whole_ids:
            return chat
    return framed


def _with_frames(chat: ChatIds, template: "ChatTemplate", backend: tokenizers.Tokenizer, opened: str) -> ChatIds:
    """Returns the ids with those around the messages of a conversation. ``opened``: the text from the end of the
    user's frame to the image. The template must have frames."""
    *texts, reply = template.frames
    frames = []
    for opening, closing in zip(texts[::2], texts[1::2], strict=True):
        (begins, lead), (trail, ends) = _cut_last(backend, opening), _cut_first(backend, closing)
        frames.append(Frame(tuple(_ids(backend, begins)), lead, trail, tuple(_ids(backend, ends))))
    *prefix, _ = _ids(backend, opened)
    return replace(chat, prefix=tuple(prefix), frames=tuple(frames), reply_ids=tuple(_ids(backend, reply)))


def _placeholder(backend: tokenizers.Tokenizer, markup: ImageMarkup) -> str:
    """Returns the text of the image's placeholder, which must be an added token, so that no other text contains
    it."""
    given = markup.placeholder
    number = backend.token_to_id(given) if isinstance(given, str) else given
    added = backend.get_added_tokens_decoder()
    if number is None or number not in added:
        raise _refused(f"the tokenizer has no added token {given}, which stands for an image")
    return str(added[number].content)


class ChatEncoder:
    """Tokenizes the text of messages. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, chat: ChatIds) -> None:
        """Changes ``backend``: from now on it encodes special tokens as text."""
        self._chat = chat
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        if len(self._special) == len(added):
            self._plain = backend
        # A copy keeps the tokenizer's decoding. All added tokens are special in the copy, so it encodes them as
        # text.
        else:
            self._plain = tokenizers.Tokenizer.from_str(backend.to_str())
            self._plain.add_special_tokens(list(added.values()))
        self._plain.encode_special_tokens = True

    def ids(self, text: str, around: Dialogue = Dialogue(), most_ahead: int | None = None) -> PromptIds:  # noqa: B008 - frozen
        """Returns a row's own ids behind its start token: those of a message up to the reply, between other texts.

        The text before the image is moved behind it if the template does this, if the template has no frames, or if
        more than ``most_ahead`` tokens would stand before the image. An empty text stands for the default one,
        unless another text asks for something.

        Raises:
            PromptError: the tokenizer joins the text's beginning with the template's text; or a text holds a
                special token, as some kinds of tokenizer have special tokens as pieces of text too; or the template
                has no frames for other messages.
        """
        chat = self._chat
        if (around.before or around.after) and not chat.frames:
            raise PromptError("be a single message for this model")
        ahead: list[int] = []
        if chat.frames:
            user, lead = self._frame(USER), "" if chat.image_first else around.lead
            ahead = [*self._framed(around.before), *user.opening_ids, *self._plain_ids(user.lead, lead, "")]
        fits = most_ahead is None or len(ahead) <= most_ahead
        if around.lead and (chat.image_first or not chat.frames or not fits):
            found = self.ids(f"{around.lead}{text}", replace(around, lead=""), most_ahead)
            noticed = around.lead.strip() and not chat.image_first
            return found._replace(moved=max(len(ahead), 1)) if noticed else found
        given = text.strip() if chat.strips else text
        given = given if given or around.asks else DEFAULT_INSTRUCTION
        ids = self._plain_ids(chat.lead, given, chat.trail)
        closing: tuple[int, ...] = chat.closing_ids
        if around.after:
            closing = (*self._frame(USER).closing_ids, *self._framed(around.after), *chat.reply_ids)
        start, *others = (*chat.opening_ids, *ids, *closing)
        if start != chat.start_id:
            raise PromptError("not begin with a space or a new line")
        return PromptIds((*ahead, *others), len(ahead))

    def _framed(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        found: list[int] = []
        for role, text in messages:
            frame = self._frame(role)
            found += [*frame.opening_ids, *self._plain_ids(frame.lead, text, frame.trail), *frame.closing_ids]
        return found

    def _frame(self, role: str) -> Frame:
        return self._chat.frames[ROLES.index(role)]

    def _plain_ids(self, lead: str, text: str, trail: str) -> list[int]:
        ids = _ids(self._plain, f"{lead}{text}{trail}")
        if not self._special.isdisjoint(ids):
            raise PromptError("hold none of the model's special tokens")
        return ids


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(encoded(backend, text).ids)


def _with_bos(backend: tokenizers.Tokenizer, text: str, bos: str | None) -> list[int]:
    """Returns the ids of a text's beginning, with the tokens that the tokenizer puts before every text.

    Like in transformers, these tokens are added only if the template has not added them.
    """
    plain = _ids(backend, text)
    if bos is not None and text.startswith(bos):
        return plain
    whole = list(encoded(backend, text, add_special_tokens=True).ids)
    added = len(whole) - len(plain)
    if whole[added:] != plain:
        raise _refused("the tokenizer puts a token after every text")
    return whole


def _specials(backend: tokenizers.Tokenizer, text: str) -> list[tuple[int, int]]:
    """Returns the start and end of each added token in a text."""
    added = backend.get_added_tokens_decoder()
    tokens = encoded(backend, text)
    return [span for token, span in zip(tokens.ids, tokens.offsets, strict=True) if token in added]


def _cut_last(backend: tokenizers.Tokenizer, text: str) -> tuple[str, str]:
    """Returns a text up to its last added token, and the rest."""
    end = max((end for _, end in _specials(backend, text)), default=0)
    return text[:end], text[end:]


def _cut_first(backend: tokenizers.Tokenizer, text: str) -> tuple[str, str]:
    """Returns a text before its first added token, and the rest."""
    start = min((start for start, _ in _specials(backend, text)), default=len(text))
    return text[:start], text[start:]


def _refused(why: str) -> ConfigError:
    """Returns the error. Unprintable characters from the checkpoint in ``why`` are escaped: they could move a
    terminal's cursor."""
    return ConfigError(_FIELD, "", "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in why))


_FILE, _LEGACY = "chat_template.jinja", "chat_template.json"
_CHILD = Path(__file__).with_name("chat_render.py")
_MOST_BYTES = 256 * 1024
_SECONDS = 60  # limit for the child on a very busy machine; the child limits its processor time itself
# No template contains this text, and its tokenization does not matter.
_PROBE = "snapcap probe 7"
_SPACED = f" \n{_PROBE}\n "
# Messages around the one with the image, by which a template's frames are tried.
_DIALOGUE = Dialogue(
    ((SYSTEM, _SPACED), (USER, "x"), (ASSISTANT, _SPACED)),
    ((ASSISTANT, "y"), (USER, _SPACED), (ASSISTANT, ""), (USER, "z")),
)
_USER_FRAME = 2 * ROLES.index(USER)  # the place of the text before a user's text in a template's frames
_FIELD = "chat_template"
Render = Callable[[Sequence[object]], list[str]]


@dataclass(frozen=True)
class ChatTemplate:
    """The rendered text of a message of one image and a text: ``before``, the message's text, ``after``.

    ``before`` contains the image's placeholder. ``strips`` tells that white space around the message's text is
    removed. ``image_first``: the template puts the image before all texts of its message.

    frames: the texts before and behind the text of a message of each role in ``ROLES``, and the text that begins
        the reply. Empty if the template does not render a conversation message by message.
    """

    before: str
    after: str
    strips: bool
    image_first: bool = False
    frames: tuple[str, ...] = ()

    def conversation(self, text: str, around: Dialogue) -> str:
        """Returns the rendered text of the message with the image between other messages. Needs ``frames``."""
        *frames, reply = self.frames

        def rendered(messages: Sequence[tuple[str, str]]) -> str:
            places = [(2 * ROLES.index(role), said) for role, said in messages]
            return "".join(f"{frames[place]}{said}{frames[place + 1]}" for place, said in places)

        opening, closing = frames[_USER_FRAME : _USER_FRAME + 2]
        shown = f"{opening}{around.lead}{self.before.removeprefix(opening)}{text}{closing}"
        return f"{rendered(around.before)}{shown}{rendered(around.after)}{reply}"


def read_template(folder: Path) -> ChatTemplate:
    """Renders the checkpoint's template, in a process of limited time and memory. Raises ConfigError if there is no
    template, or it does more than put text around a message's parts."""
    template, names = _template(folder), special_tokens(folder)
    refusals: list[ConfigError] = []
    # A template without messages of several parts adds the image itself, as JoyCaption's does.
    for content in (_parts, _whole):
        try:
            return _around(lambda conversations: _rendered(template, conversations, names), content)
        except ConfigError as error:
            refusals.append(error)
        except _NotRenderedError as error:
            raise _refused(str(error)) from None
    raise refusals[0]


def _parts(text: str, lead: str = "") -> list[dict[str, str]]:
    before, behind = ([{"type": "text", "text": each}] if each else [] for each in (lead, text))
    return [*before, {"type": "image"}, *behind]


def _whole(text: str, lead: str = "") -> str:
    return f"{lead}{text}"


def _around(render: Render, content: Callable[..., object]) -> ChatTemplate:
    """Returns the text that is rendered around a message's text. ``content`` makes the message's content of its
    text."""
    probes = [[{"role": USER, "content": content(text)}] for text in (_PROBE, _SPACED)]
    texts = render(probes)
    before, found, after = texts[0].partition(_PROBE)
    if not found or _PROBE in after:
        raise _refused(f"a message's text is to be rendered once, and is {texts[0].count(_PROBE)} times")
    for strips, inner in ((False, _SPACED), (True, _PROBE)):
        if texts[1] == f"{before}{inner}{after}":
            first = _image_first(before, after, render, content)
            return _with_conversations(ChatTemplate(before, after, strips, first), render, content)
    raise _refused("a message's text is to be rendered as it is, or without the space around it")


def _image_first(before: str, after: str, render: Render, content: Callable[..., object]) -> bool:
    """Returns whether the template puts an image that stands behind a text before this text."""
    probe = [{"role": USER, "content": content("", _PROBE)}]
    try:
        return render([probe]) == [f"{before}{_PROBE}{after}"]
    except ConfigError:  # the template refuses such a message
        return False


def _dialogues(template: ChatTemplate) -> list[Dialogue]:
    """Returns conversations by which frames are tried, with and without a text before the image, if that may be."""
    return [replace(_DIALOGUE, lead=lead) for lead in (("",) if template.image_first else (_SPACED, ""))]


def _with_conversations(around: ChatTemplate, render: Render, content: Callable[..., object]) -> ChatTemplate:
    """Returns the template with its frames, if it renders a conversation message by message."""
    system, asked, reply, more = (f"snapcap says {number}" for number in range(1, 5))

    def said(messages: Sequence[tuple[str, str]]) -> list[dict[str, object]]:
        return [{"role": role, "content": text} for role, text in messages]

    probes = (
        ((USER, asked),),
        ((USER, asked), (ASSISTANT, reply)),
        ((SYSTEM, system), (USER, asked)),
        ((USER, asked), (ASSISTANT, reply), (USER, more)),
    )
    dialogues = _dialogues(around)
    whole = [
        [*said(each.before), {"role": USER, "content": content(_SPACED, each.lead)}, *said(each.after)]
        for each in dialogues
    ]
    try:
        texts = render([*map(said, probes), *whole])
        user, end = _cut(texts[0], asked)
        _, between, last = _cut(texts[1], asked, reply)
        opening, behind, _ = _cut(texts[2], system, asked)
        _, _, again, _ = _cut(texts[3], asked, reply, more)
    except (ConfigError, ValueError):  # the template refuses a role, or leaves a text out
        return around
    replied = again.removesuffix(user)
    begins = last.removeprefix(replied)
    closing = end.removesuffix(begins)
    frames = (opening, behind.removesuffix(user), user, closing, between.removeprefix(closing), replied, begins)
    framed = replace(around, frames=frames)
    right = texts[len(probes) :] == [framed.conversation(_SPACED, each) for each in dialogues]
    return framed if right and around.before.startswith(user) and around.after == closing + begins else around


def _cut(text: str, *words: str) -> list[str]:
    """Returns the parts of a text between words. Raises ValueError if a word is not there, in its order."""
    parts = []
    for word in words:
        place = text.index(word)
        parts.append(text[:place])
        text = text[place + len(word) :]
    return [*parts, text]


def _template(folder: Path) -> str:
    """Returns the template from the first file that has one, in transformers' order.

    The processor's file goes before the template files, of which the older one goes first, and these go before the
    tokenizer's file.
    """
    for name in ("processor_config.json", _LEGACY, _FILE, "tokenizer_config.json"):
        if name == _FILE and is_there(folder / name):
            return _template_file(folder / name)
        if name == _FILE:
            continue
        value = json_or_empty(folder / name).get(_FIELD)
        if isinstance(value, list):  # a list of templates by name
            named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
            value = named.get("default")
        if value is None:
            continue
        if not isinstance(value, str) or len(value) > _MOST_BYTES:
            raise ConfigError(_FIELD, name, f"a text of at most {_MOST_BYTES} characters is expected")
        return value
    raise _refused(f"the checkpoint has none; {_FILE} is expected")


def _template_file(file: Path) -> str:
    """Returns the content of a file that is a template."""
    content = read_bytes(file, _MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise _refused(f"{_FILE} has more than {_MOST_BYTES} bytes")
    try:
        return io.StringIO(content.decode(), newline=None).read()  # reads line ends like a text file
    except UnicodeDecodeError:
        raise _refused(f"{_FILE} is not UTF-8") from None


class _NotRenderedError(Exception):
    """The rendering process gave no answer, so nothing is known of the template. On a busy machine, another
    process may get an answer, so this must not change what the model reads."""


def _rendered(template: str, conversations: Sequence[object], names: Mapping[str, str]) -> list[str]:
    """Returns the text of each conversation. Raises ConfigError if the template refuses one; _NotRenderedError."""
    asked = json.dumps({"template": template, "messages": conversations, "names": names})
    # The child needs only Jinja. Isolated and without an environment, it reads no secrets from variables.
    command = [sys.executable, "-I", str(_CHILD)]
    try:
        run = subprocess.run(  # noqa: S603 - runs this interpreter on snapcap's own module
            command, input=asked.encode(), capture_output=True, timeout=_SECONDS, env={}, check=False
        )
    except subprocess.TimeoutExpired:
        raise _NotRenderedError(f"it is not rendered within {_SECONDS} seconds") from None
    if run.returncode < 0:
        raise _NotRenderedError("it takes more time or memory than it may")
    if run.returncode:
        last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _NotRenderedError(f"cannot be rendered ({last[:300]})")
    reply: dict[str, Any] = json.loads(run.stdout)
    if "error" in reply:
        raise _refused(f"cannot be rendered ({reply['error']})")
    return [str(text) for text in reply["text"]]
