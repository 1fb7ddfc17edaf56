"""Every field of every family's configuration with values that nobody writes: each is read, or refused by name."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.random_pairs import CAPTIONERS, PAIRS

from snapcap.models.config import ModelConfig
from snapcap.models.fields import ConfigError
from snapcap.models.text import ChatIds, ImageMarkup

# Each part of a pair once.
OTHERS = (
    "roberta with relu, and padding last",
    "trocr base",
    "deit and gpt2",
    "deit and bert",
    "beit with relative positions",
)
FAMILIES = {name: make for name, make in CAPTIONERS.items() if name not in PAIRS or name in OTHERS}
VALUES: tuple[Any, ...] = (
    *(-7, 0, 10**18, 10**400, 0.5, 1e308, float("nan"), float("inf"), True, None),
    *("x", "\ud800", [], [5], ["x"], [[1]], [None] * 3, {}, {"a": 1}),
)
GENERATION = {
    **{"num_beams": 3, "length_penalty": 1.0, "early_stopping": True, "no_repeat_ngram_size": 3},
    **{"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_bos_token_id": 1},
    **{"max_length": 10, "max_new_tokens": 5},
}
Place = tuple[Any, ...]


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inside:
        yield (*path, name)
        yield from places(each, (*path, name))


def changed(value: Any, path: Place, replacement: object) -> Any:
    value = copy.deepcopy(value)
    place = value
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = replacement
    return value


def chat(_folder: Path, _markup: ImageMarkup) -> ChatIds:
    return ChatIds((1,), 2, (3,), "", "", (4,), True)


def outcome(folder: Path) -> str:
    """Of reading a configuration; "wrong" is what can neither be listed and run, nor is refused in a line."""
    try:
        read = ModelConfig.from_folder(folder, chat)
    except ConfigError as error:
        return "refused" if str(error).isprintable() and len(str(error)) < 600 else "wrong"
    listable = read.vision.num_layers + read.decoder.num_layers < 2500
    return "read" if listable and 0 <= read.generation.pad_id < read.decoder.vocab_size else "wrong"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_value_is_read_or_refused_by_name(tmp_path: Path, family: str) -> None:
    config = json.loads(FAMILIES[family]().config.to_json_string(use_diff=False))
    files = {"config.json": config, "generation_config.json": GENERATION}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    ModelConfig.from_folder(tmp_path, chat)
    outcomes: dict[str, list[tuple[Place, object]]] = {"read": [], "refused": [], "wrong": []}
    for name, content in files.items():
        for path in places(content):
            for value in VALUES:
                (tmp_path / name).write_text(json.dumps(changed(content, path, value)))
                outcomes[outcome(tmp_path)].append((path, value))
        (tmp_path / name).write_text(json.dumps(content))
    assert outcomes["wrong"] == []
    assert min(len(outcomes["read"]), len(outcomes["refused"])) > 100


def test_no_length_penalty_is_not_the_default_one(tmp_path: Path) -> None:
    config = json.loads(CAPTIONERS["florence2"]().config.to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({**GENERATION, "length_penalty": 0.0}))
    assert ModelConfig.from_folder(tmp_path).generation.length_penalty == 0
