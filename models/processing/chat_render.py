"""Renders a chat template in a process of its own, which imports none of snapcap: templates are untrusted.

Reads ``{"template", "messages", "names"}`` as JSON and writes ``{"text": [...]}`` with a text for each list of
messages, or ``{"error"}``. Jinja's sandbox keeps a template from Python. Time, memory and output are limited here,
because a single line of a template can run for years or ask for terabytes. Templates get the globals and filters
that transformers gives them, except the time of day, because the text is rendered once and must not depend on it.
"""

import contextlib
import json
import resource
import sys
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CPU_SECONDS = 2
_MEMORY = 1 << 30
_MOST_CHARACTERS = 64 * 1024  # greatest number of characters in a rendered text


class _Generation(Extension):
    """``{% generation %}``, with which templates mark the replies for training. The content is rendered as it
    is."""

    tags = {"generation"}  # noqa: RUF012 - declared as in Jinja

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def render(template: str, conversations: list[Any], names: dict[str, str]) -> list[str]:
    """Returns the text of each conversation, up to the beginning of the model's reply. Raises
    jinja2.TemplateError, ValueError, TypeError if the template is invalid, or refuses the messages."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    compiled = environment.from_string(template)
    texts = []
    for messages in conversations:
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        text = compiled.render(**names, **given)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"it renders more than {_MOST_CHARACTERS} characters")
        text.encode()  # raises ValueError for half of a surrogate pair, which is no text
        texts.append(text)
    return texts


def _main() -> None:
    for limit, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _CPU_SECONDS)):
        with contextlib.suppress(ValueError, OSError):  # the system has no such limit, or a lower one
            resource.setrlimit(limit, (most, most))
    asked = json.load(sys.stdin)
    try:
        reply: dict[str, Any] = {"text": render(asked["template"], asked["messages"], asked["names"])}
    except MemoryError:
        reply = {"error": "it takes more memory than it may"}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"[:300]}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    _main()
