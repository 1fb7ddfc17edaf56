"""Digests of sources: code counts, comments and docstrings do not."""

import ast
from pathlib import Path

import pytest

from snapcap.warmup.artifacts.key import code_of, source_digest

ROOT = Path(__file__).parents[3]
HASHED = [
    *sorted((ROOT / "models" / "regions").rglob("*.py")),
    *sorted((ROOT / "models" / "weights").rglob("*.py")),
    *sorted((ROOT / "models" / "families").rglob("*.py")),
    *(ROOT / "models" / name for name in ("names.py", "text.py", "dimensions.py", "config.py")),
]


def tree(source: str) -> str:
    """Returns the syntax tree without statements that are only a string."""
    parsed = ast.parse(source)
    for node in ast.walk(parsed):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, name, None), list):
                kept = [each for each in statements if not is_text(each)]
                statements[:] = kept or [ast.Pass()] * (name == "body")
    return ast.dump(parsed)


def is_text(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)


def whole(code: str) -> str:
    """Puts `pass` where a docstring was the only statement."""
    lines, whole = code.split("\n"), []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        whole.append(line)
        depth, next_depth = (len(each) - len(each.lstrip()) for each in (line, following))
        if line.lstrip().startswith(("class ", "def ")) and line.endswith(":") and next_depth <= depth:
            whole.append(" " * (depth + 1) + "pass")
    return "\n".join(whole)


@pytest.mark.parametrize("file", HASHED, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_code_of_a_source_has_its_tree(file: Path) -> None:
    source = file.read_text()
    code = code_of(source)
    assert tree(whole(code)) == tree(source)
    parsed = ast.parse(whole(code))
    assert not [node for node in ast.walk(parsed) if isinstance(node, ast.stmt) and is_text(node)]
    assert "\n\n" not in code


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('a = "# b"', 'a = "# c"'),
        ("a = '\\\\' # b", "a = '\\\\\\\\' # b"),
        ('a = """b\n# c\n"""', 'a = """b\n# d\n"""'),
        ('a = """b\n\n"""', 'a = """b\n"""'),
        ('f(\n    """a"""\n)', 'f(\n    """b"""\n)'),
        ("if a:\n    b()\nc()", "if a:\n    b()\n    c()"),
        ("a = 1", "a = 2"),
    ],
)
def test_another_code_is_another(one: str, other: str) -> None:
    assert code_of(one) != code_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a = 1  # b", "a = 1"),
        ('def f():\n    """A "b" # c."""\n    return 1', "def f():\n    # d\n\n    return 1\n"),
        (
            'class A:\n    b: int\n    """Bytes.\n\n    # More.\n    """\n    c: int',
            "class A:\n    b: int\n    c: int",
        ),
    ],
)
def test_the_same_code_is_the_same(one: str, other: str) -> None:
    assert code_of(one) == code_of(other)


def test_a_digest_has_the_names_of_files(tmp_path: Path) -> None:
    one, other = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1\n")
    first = source_digest(tmp_path, [one])
    one.rename(other)
    assert source_digest(tmp_path, [other]) != first
    readme = tmp_path / "a.h"
    readme.write_text("int a; // b\n")
    first = source_digest(tmp_path, [readme])
    readme.write_text("int a;\n")
    assert source_digest(tmp_path, [readme]) != first, "other languages have other comments"
