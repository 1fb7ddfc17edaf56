"""The lines that docs/troubleshooting.md and docs/hub.md explain are lines that the program prints."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
HUB = (ROOT / "docs" / "hub.md").read_text().partition("## When a download fails")[2]
LINES = re.findall(r"^\| (`[^|]*`) ?[^|]*\|", PAGE.partition("## Requests fail")[0] + HUB, re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts of the product's sources; what an f-string puts in is an ellipsis."""
    found = []
    for room in ("models", "warmup", "service"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value.replace("%s", "…"))
    return found


def test_the_page_has_lines() -> None:
    assert len(LINES) >= 12


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_one_of_the_programs(line: str, texts: list[str]) -> None:
    for text in re.findall(r"`([^`]+)`", line):
        for piece in re.split("[…'()]|[:;] ", text):
            if len(piece) > 8 and "=" not in piece:
                assert any(piece.strip(" :;") in each for each in texts), piece
