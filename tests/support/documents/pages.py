"""Finds the pages of the site, and the blocks of code in each."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
RUN = ("bash", "python")
_NAV_LINE = re.compile(r"^ +- [^:]+: (\S+\.md)$", re.MULTILINE)
_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?(?P<fence>```+)(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """``language``: the word behind the fence, or "". ``mark``: what the comment in the line above says, or ""."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def is_run(self) -> bool:
        """Tells if the block is for a reader to run, and no comment says that a test cannot run it."""
        return self.language in RUN and not self.mark

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """The paths of all pages, in the order of the site."""
    return _NAV_LINE.findall((ROOT / "mkdocs.yml").read_text())


def blocks(page: str) -> list[Block]:
    """The blocks of a page that stand between fences, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("fence")) + 1,
            found["language"],
            found["mark"] or "",
            found["text"],
        )
        for found in _FENCE.finditer(text)
    ]
