"""Digests our sources by what they compute: comments and docstrings do not count.

A start digests them each time, so they are not parsed: `ast.parse` of the regions takes 60 ms, and Python's
versions disagree about the tree. A substitution takes 3 ms.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

_LONG = r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
_SHORT = r"""["][^"\\\n]*(?:\\.[^"\\\n]*)*["]|['][^'\\\n]*(?:\\.[^'\\\n]*)*[']"""
# Strings are matched so that nothing in them is taken for a comment.
_TEXTS = re.compile(rf"#[^\n]*|{_LONG}|{_SHORT}", re.DOTALL)
_CLOSED = re.compile(r"\s*[)\]},]")


def code_of(source: str) -> str:
    """Returns Python source without comments, docstrings and blank lines."""
    code = _TEXTS.sub(_code, source)
    return "\n".join(line for line in map(str.rstrip, code.split("\n")) if line)


def _code(match: re.Match[str]) -> str:
    text = match[0]
    if text[0] == "#":
        return ""
    if text.startswith('"""'):
        source, start = match.string, match.start()
        before = source[source.rfind("\n", 0, start) + 1 : start]
        # A docstring begins its line, and no bracket closes behind it.
        if before.strip(" \trR") == "" and not _CLOSED.match(source, match.end()):
            return ""
    return text.replace("\n", "\\n") if "\n" in text else text


def source_digest(folder: Path, files: Iterable[Path]) -> str:
    """Returns the SHA-256, in hex, of the files below the folder, with their names. Line endings do not count, and
    of Python files only code does.

    Raises:
        OSError: a file cannot be read.
        UnicodeDecodeError: a file is not UTF-8.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        text = file.read_text("utf-8")  # with the line endings of Unix
        code = (code_of(text) if file.suffix == ".py" else text).encode()
        digest.update(b"%s %d\n%s" % (file.relative_to(folder).as_posix().encode(), len(code), code))
    return digest.hexdigest()
