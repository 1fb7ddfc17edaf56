"""Reads a checkpoint's chat template, and the text that it puts around the image and text of a user's message."""

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
_SECONDS = 60  # limit for the child on a very busy machine; the child limits its processor time itself
# No template contains this text, and its tokenization does not matter.
_PROBE = "snapcap probe 7"
_SPACED = f" \n{_PROBE}\n "
_FIELD = "chat_template"


@dataclass(frozen=True)
class ChatTemplate:
    """The rendered text of a message of one image and a text: ``before``, the message's text, ``after``.

    ``before`` contains the image's placeholder. ``strips`` tells that white space around the message's text is
    removed.
    """

    before: str
    after: str
    strips: bool


def read_template(folder: Path) -> ChatTemplate:
    """Renders the checkpoint's template, in a process of limited time and memory.

    Raises:
        ConfigError: there is no template, or it does more than put text around a message's parts.
    """
    template, names = _template(folder), tokenizer_files.special_tokens(folder)
    try:
        return _around(template, names, _parts)
    except ConfigError as error:
        # A template without messages of several parts adds the image itself, as JoyCaption's does.
        try:
            return _around(template, names, str)
        except ConfigError:
            raise error from None


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "image"}, {"type": "text", "text": text}]


def _around(template: str, names: Mapping[str, str], content: Callable[[str], object]) -> ChatTemplate:
    """Returns the text that is rendered around a message's text. ``content`` makes the message's content of its
    text."""
    texts = _rendered(template, [content(text) for text in (_PROBE, _SPACED)], names)
    before, found, after = texts[0].partition(_PROBE)
    if not found or _PROBE in after:
        raise _refused(f"a message's text is to be rendered once, and is {texts[0].count(_PROBE)} times")
    for strips, inner in ((False, _SPACED), (True, _PROBE)):
        if texts[1] == f"{before}{inner}{after}":
            return ChatTemplate(before, after, strips)
    raise _refused("a message's text is to be rendered as it is, or without the space around it")


def _template(folder: Path) -> str:
    """Returns the template from the first file that has one, in transformers' order.

    A template file goes before the processor's file, and this one before the tokenizer's.
    """
    file = folder / _FILE
    if is_there(file):
        content = read_bytes(file, _MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise _refused(f"{_FILE} has more than {_MOST_BYTES} bytes")
        try:
            return io.StringIO(content.decode(), newline=None).read()  # reads line ends like a text file
        except UnicodeDecodeError:
            raise _refused(f"{_FILE} is not UTF-8") from None
    for name in (_LEGACY, "processor_config.json", "tokenizer_config.json"):
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


def _rendered(template: str, contents: list[object], names: Mapping[str, str]) -> list[str]:
    messages = [[{"role": "user", "content": content}] for content in contents]
    asked = json.dumps({"template": template, "messages": messages, "names": names})
    # The child needs only Jinja. Isolated and without an environment, it reads no secrets from variables.
    command = [sys.executable, "-I", str(_CHILD)]
    try:
        run = subprocess.run(  # noqa: S603 - runs this interpreter on snapcap's own module
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
    """Returns the error. Unprintable characters from the checkpoint in ``why`` are escaped: they could move a
    terminal's cursor."""
    return ConfigError(_FIELD, "", "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in why))
