"""Counts the sentences that have no subject in docstrings, comments and help texts of Python files.

python tests/support/plain_english.py warmup service
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A sentence that starts with one of these words leaves its noun to another sentence.
RIDDLES = {"those", "that", "what", "one", "it", "as", "of", "whose", "who", "which", "whether"}
IDIOMS = ("as an example", "as a result", "as well as", "of course", "that is,", "one or more", "as soon as")
# The gap of a sentence's end: not after an abbreviation, nor before a lower-case word.
END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\betc)[.!?][)\"']*\s+(?=[A-Z`\"'(])")
# The part of a comment that is for tools; the reason may follow it.
DIRECTIVE = re.compile(r"#[#: ]*((noqa|type:|mypy:|ruff:|pragma|fmt:|!)[^#]*?( - |  |#|$))?[#: ]*")


class Text(NamedTuple):
    line: int
    text: str


class Riddle(NamedTuple):
    file: Path
    line: int
    sentence: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.sentence}"


def riddles(file: Path) -> list[Riddle]:
    """Returns the sentences of a Python file that have no subject, in the order of the file."""
    source = file.read_text()
    texts = [*_docstrings_and_help(ast.parse(source)), *_comments(source)]
    return [
        Riddle(file, text.line + before, sentence)
        for text in sorted(texts)
        for before, sentence in sentences(text.text)
        if is_riddle(sentence)
    ]


def is_riddle(sentence: str) -> bool:
    """Returns whether a sentence starts with a word in place of a noun or verb. A question may."""
    if sentence.endswith("?") or sentence.lower().startswith(IDIOMS):
        return False
    first = re.match(r"[\W_]*([A-Za-z]+)(?=[\s,:;.]|$)", sentence)
    return first is not None and not sentence.startswith("`") and first[1].lower() in RIDDLES


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yields each sentence of a text and the number of lines before it, without blocks of code and tables."""
    for paragraph in re.finditer(r"[^\n]*\S[^\n]*(?:\n[^\n]*\S[^\n]*)*", text):
        lines = paragraph[0].splitlines()
        if lines[0].startswith(("    ", ">>>", "|")) and paragraph.start() > 0:
            continue
        start = 0
        for end in [*(match.end() for match in END.finditer(paragraph[0])), len(paragraph[0])]:
            sentence = " ".join(paragraph[0][start:end].split())
            if sentence:
                yield text.count("\n", 0, paragraph.start() + start), sentence
            start = end


def _docstrings_and_help(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):  # a docstring, of an attribute too
                yield Text(node.lineno, text.replace("\n" + " " * node.col_offset, "\n"))
            case ast.keyword(arg="help" | "description" | "epilog", value=ast.Constant(value=str(text))):
                yield Text(node.value.lineno, text)
            case ast.Call(func=ast.Name(id="option"), args=[_, _, ast.Constant(value=str(text)), *_]):
                yield Text(node.args[2].lineno, text)


def _comments(source: str) -> Iterator[Text]:
    """Yields the comments; those on lines of their own that follow each other are a text."""
    block: list[str] = []
    start, column = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = DIRECTIVE.sub("", token.string, count=1)
        own_line = token.line[: token.start[1]].strip() == ""
        if block and own_line and (token.start[0], token.start[1]) == (start + len(block), column):
            block.append(line)
            continue
        if block:
            yield Text(start, "\n".join(block))
            block = []
        if own_line:
            block, start, column = [line], *token.start
        else:
            yield Text(token.start[0], line)
    if block:
        yield Text(start, "\n".join(block))


def main() -> None:
    """Prints each sentence of the given files and folders that has no subject, and their number."""
    files = [
        file
        for name in sys.argv[1:]
        for file in ([Path(name)] if Path(name).is_file() else Path(name).rglob("*.py"))
    ]
    found = [riddle for file in sorted(files) for riddle in riddles(file)]
    print(*found, f"{len(found)} sentences without a subject in {len(files)} files", sep="\n")


if __name__ == "__main__":
    main()
