"""Holds that sentences in docstrings, comments and help texts have a subject, in the rooms that are done."""

from pathlib import Path

import pytest
from support.plain_english import riddles

ROOT = Path(__file__).parent.parent
# A room is added here when none of its sentences lacks a subject.
ROOMS = [
    "benchmarks",
    "deploy",
    "models",
    "warmup",
    "service/http/problems.py",
    "service/http/routing.py",
    "service/api",
    "service/captioning",
    "service/cli",
    "service/config",
    "service/engine",
    "service/errors.py",
    "service/readiness.py",
    "service/http",
    "service/images",
    "service/ipc",
    "service/limits.py",
    "service/memory.py",
    "service/offline",
    "service/server",
    "service/telemetry",
    "service/watch.py",
    "snapcap",
    "tests/support",
]


@pytest.mark.parametrize("room", ROOMS)
def test_every_sentence_has_a_subject(room: str) -> None:
    place = ROOT / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    found = [each for file in files for each in riddles(file)]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Those that are over."""', [1]),
        ('"""Returns a file.\n\nIt is open. What it holds is not read.\n"""', [3, 3]),
        ('class A:\n    a: int\n    """Of the largest bucket."""', [3]),
        ("a = 1  # of a worker", [1]),
        ("# A sentence that goes\n# on. As torch does it.\na = 1\n# Those.", [2, 4]),
        ("import os  # noqa: F401 - which few starts need", [1]),
        ('parser.add_argument("--a", help="what to do")', [1]),
        ('option("a", 1, "whether to do it")', [1]),
    ],
)
def test_a_sentence_without_a_subject_is_found(source: str, lines: list[int], tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(source)
    assert [riddle.line for riddle in riddles(file)] == lines


@pytest.mark.parametrize(
    "source",
    [
        '"""Returns what it was given, e.g. It or one of those."""',
        '"""What happens when the store is gone?"""',
        '"""As an example, a folder."""',
        '"""Shows code:\n\n    it = those(what)\n"""',
        '"""`it` names a test. ``one`` names another."""',
        '"""Itself, oneself, ones and whatever are other words."""',
        'a = "Those that are text of the program."',
        "import os  # noqa: F401",
        'parser.add_argument("--a", help="folder of what is built")',
    ],
)
def test_a_sentence_with_a_subject_is_not_found(source: str, tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(source)
    assert riddles(file) == []
