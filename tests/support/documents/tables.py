"""Writes the documents' tables from declarations in the code: `python tests/support/documents/tables.py PAGE`.

A table replaces the text between its two comments on the page; the comments stay. Without a page, all tables are
printed.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from snapcap.service.captioning.options import OPTIONS, Number, default_of
from snapcap.service.config.settings import GROUPS
from snapcap.service.limits import LIMITS
from snapcap.warmup.option import Option, options_of

_PLACE = re.compile(r"(<!-- (\w+): written by [^\n]* -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
_TITLES = {"http": "HTTP", "s3": "S3"}


def server_options() -> str:
    """Returns a section with a table for each group of server options, in the order of the help."""
    sections = []
    for name, group in GROUPS.items():
        title = _TITLES.get(name, name.replace("_", " ").capitalize())
        rows = [_row(option) for option in options_of(group).values()]
        table = _table(("option", "variable", "default", ""), rows)
        sections.append(f"## {title}\n\n{group.__doc__ or ''}\n\n{table}")
    return "\n\n".join(sections)


def caption_options() -> str:
    rows = []
    for name, option in OPTIONS.items():
        unset = ", or -1: not given" if isinstance(option.kind, Number) and option.kind.unset else ""
        others = ", ".join(f"`{each}`" for each in option.openai if each != name)
        spelled = f" In an OpenAI request also {others}." if others else ""
        spelled += f" In Ollama's `options` also `{option.ollama}`." if option.ollama else ""
        rows.append((f"`{name}`", option.kind.values + unset, _default(name), option.help + spelled))
    return _table(("option", "value", "default", ""), rows)


def refusals() -> str:
    """Returns the table of the limits beyond which a request gets 413, 429, 431 or 503."""
    options = {option.name: option for group in GROUPS.values() for option in options_of(group).values()}
    rows = []
    for limit in LIMITS:
        option = options[limit.option] if limit.option else None
        bound = limit.bound or (option.default_text if option else "")
        setting = f"`{option.flag}`" if option else "–"
        metric = f"`snapcap_{limit.metric}_total` `{limit.reason or limit.error.code}`"
        rows.append((f"{limit.error.status} `{limit.error.code}`", limit.what, bound, setting, metric))
    return _table(("refusal", "limit", "default", "option", "metric and its reason"), rows)


TABLES = {"settings": server_options, "options": caption_options, "refusals": refusals}


def with_tables(page: str) -> str:
    """Returns the text of a page with its tables updated.

    Raises ValueError if the page lacks the two comments of a table, KeyError for an unknown table."""
    written, count = _PLACE.subn(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n\n{place[3]}", page)
    if not count:
        raise ValueError("the page has no place for a table, between its two comments")
    return written


def _row(option: Option) -> tuple[str, ...]:
    flag = option.flag if option.is_switch else f"{option.flag} {option.metavar}".replace("|", "\\|")
    return f"`{flag}`", f"`{option.variable}`", option.default_text, option.help


def _default(name: str) -> str:
    default = default_of(name)
    if isinstance(default, float):
        return f"{default:g}"
    return OPTIONS[name].default or (default if isinstance(default, str) else json.dumps(default))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0].replace("|  |", "| |"), "|" + "---|" * len(head), *lines[1:]])


def main(arguments: list[str]) -> None:
    """Writes the tables into the named pages, or prints them."""
    for page in map(Path, arguments):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    if not arguments:
        print("\n\n".join(table() for table in TABLES.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
