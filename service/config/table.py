"""Writes the tables of options: `python -m snapcap.service.config.table docs/configuration.md`.

They replace what stands between the two comments there, which stay. Without a file they are printed."""

import sys
from pathlib import Path

from snapcap.service.config.settings import GROUPS
from snapcap.warmup.option import Option, options_of

BEGIN = "<!-- options: written by `python -m snapcap.service.config.table docs/configuration.md` -->"
END = "<!-- end of options -->"
_TITLES = {"http": "HTTP", "s3": "S3"}


def markdown() -> str:
    """A section with a table a group, one row an option, in the order of the help."""
    sections = []
    for name, group in GROUPS.items():
        title = _TITLES.get(name, name.replace("_", " ").capitalize())
        head = [
            f"## {title}",
            "",
            group.__doc__ or "",
            "",
            "| option | variable | default | |",
            "|---|---|---|---|",
        ]
        sections.append("\n".join([*head, *map(_row, options_of(group).values())]))
    return "\n\n".join(sections)


def with_options(page: str) -> str:
    """The text of a page with its tables as they are now.

    Raises ValueError where the page does not have the two comments in their order."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no place for the options, between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


def _row(option: Option) -> str:
    flag = option.flag if option.is_switch else f"{option.flag} {option.metavar}".replace("|", "\\|")
    return f"| `{flag}` | `{option.variable}` | {option.default_text} | {option.help} |"


def main(arguments: list[str]) -> None:
    """Writes the tables into the file that is named, or prints them."""
    if not arguments:
        print(markdown())
        return
    page = Path(arguments[0])
    page.write_text(with_options(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
