"""Reads a checkpoint's chat template, and what it puts around the image and the text of a user's message."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.models.fields import ConfigError, is_there, json_or_empty, read_bytes
from snapcap.models.processing import tokenizer_files

_FILE, _LEGACY = "chat_template.jinja", "chat_template.json"
_CHILD = Path(__file__).with_name("chat_render.py")
_MOST_BYTES = 256 * 1024
_SECONDS = 60  # of the child, on the busiest machine; its own limit is one of processor time
# What no template writes, and no tokenizer takes apart in a way that matters here.
_PROBE = "snapcap probe 7"
_SPACED = f" \n{_PROBE}\n "
_FIELD = "chat_template"


@dataclass(frozen=True)
class ChatTemplate:
    """What is rendered for a message of one image and a text: ``before``, the text, ``after``, where ``before``
    holds the image's placeholder. ``strips``: space around the text is taken away."""

    before: str
    after: str
    strips: bool


def read_template(folder: Path) -> ChatTemplate:
    """Render the checkpoint's template, in a process whose time and memory are bounded.

    Raises:
        ConfigError: there is no template, or it does more than to put text around a message's parts.
    """
    template, names = _template(folder), tokenizer_files.special_tokens(folder)
    try:
        return _around(template, names, _parts)
    except ConfigError as error:
        # One that knows no messages of several parts puts the image there by itself, as JoyCaption's does.
        try:
            return _around(template, names, str)
        except ConfigError:
            raise error from None


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "image"}, {"type": "text", "text": text}]


def _around(template: str, names: Mapping[str, str], content: Callable[[str], object]) -> ChatTemplate:
    """What is rendered around a message's text; ``content`` makes what a template is given of it."""
    texts = _rendered(template, [content(text) for text in (_PROBE, _SPACED)], names)
    before, found, after = texts[0].partition(_PROBE)
    if not found or _PROBE in after:
        raise _refused(f"a message's text is to be rendered once, and is {texts[0].count(_PROBE)} times")
    for strips, inner in ((False, _SPACED), (True, _PROBE)):
        if texts[1] == f"{before}{inner}{after}":
            return ChatTemplate(before, after, strips)
    raise _refused("a message's text is to be rendered as it is, or without the space around it")


def _template(folder: Path) -> str:
    """As transformers looks for it: files of its own before the processor's and the tokenizer's."""
    file = folder / _FILE
    if is_there(file):
        content = read_bytes(file, _MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise _refused(f"{_FILE} has more than {_MOST_BYTES} bytes")
        try:
            return io.StringIO(content.decode(), newline=None).read()  # lines end as in a text file
        except UnicodeDecodeError:
            raise _refused(f"{_FILE} is not UTF-8") from None
    for name in (_LEGACY, "processor_config.json", "tokenizer_config.json"):
        value = json_or_empty(folder / name).get(_FIELD)
        if isinstance(value, list):  # several, by name
            named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
            value = named.get("default")
        if value is None:
            continue
        if not isinstance(value, str) or len(value) > _MOST_BYTES:
            raise ConfigError(_FIELD, name, f"a text of at most {_MOST_BYTES} characters is expected")
        return value
    raise _refused(f"the checkpoint has none; {_FILE} is expected")


def _rendered(template: str, contents: list[object], names: Mapping[str, str]) -> list[str]:
    messages = [[{"role": "user", "content": content}] for content in contents]
    asked = json.dumps({"template": template, "messages": messages, "names": names})
    # Isolated and without the environment, in which there may be secrets; it needs nothing but Jinja.
    command = [sys.executable, "-I", str(_CHILD)]
    try:
        run = subprocess.run(  # noqa: S603  this interpreter and a module of ours
            command, input=asked.encode(), capture_output=True, timeout=_SECONDS, env={}, check=False
        )
    except subprocess.TimeoutExpired:
        raise _refused(f"it is not rendered within {_SECONDS} seconds") from None
    if run.returncode < 0:
        raise _refused("it takes more time or memory than it may")
    if run.returncode:
        last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _refused(f"cannot be rendered ({last[:300]})")
    reply: dict[str, Any] = json.loads(run.stdout)
    if "error" in reply:
        raise _refused(f"cannot be rendered ({reply['error']})")
    return [str(text) for text in reply["text"]]


def _refused(why: str) -> ConfigError:
    """``why``: what is the checkpoint's own in it could move a terminal's cursor."""
    return ConfigError(_FIELD, "", "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in why))
