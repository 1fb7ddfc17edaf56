"""The first line of a module's docstring is a sentence of what the module does: verb, object."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Plurals with which a bare noun phrase begins, "Options of ...", as a verb of the third person does.
NOUNS = {
    "artifacts",
    "bytes",
    "cases",
    "images",
    "kernels",
    "messages",
    "metrics",
    "options",
    "pictures",
    "pixels",
    "replies",
    "requests",
    "rows",
    "tensors",
    "tokens",
    "weights",
}


def begins_with_verb(line: str) -> bool:
    first = line.partition(" ")[0]
    return first.isalpha() and first.istitle() and first.endswith("s") and first.lower() not in NOUNS


@pytest.mark.parametrize(
    "folder", ["models", "warmup", "service", "benchmarks", "snapcap", "docs", "tests/support"]
)
def test_a_module_says_what_it_does(folder: str) -> None:
    wrong = {}
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        first = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        if not (begins_with_verb(first) and first.endswith(".")):
            wrong[str(file.relative_to(ROOT))] = first
    assert wrong == {}


@pytest.mark.parametrize("riddle", ["How a batch fits.", "What may be asked.", "The fork of a process.", "Images."])
def test_a_riddle_or_a_bare_noun_is_no_verb(riddle: str) -> None:
    assert not begins_with_verb(riddle)
