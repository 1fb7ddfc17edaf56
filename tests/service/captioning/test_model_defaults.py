"""What a request leaves to the model: its task, and the options that the checkpoint sets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support.checkpoints import random_captioners
from support.checkpoints.chat_files import write_chat_files
from support.checkpoints.florence2_files import SENTENCES, write_florence2

from snapcap.models.config import ModelConfig
from snapcap.models.fields import ConfigError
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.service.captioning.model_defaults import ModelDefaults
from snapcap.service.captioning.options import CaptionOptions, options_from_json
from snapcap.service.engine.request import Limits
from snapcap.service.errors import InvalidOption, UnsupportedOption

LIMITS = Limits(cache_length=32, default_new_tokens=8, eos_ids=frozenset({2}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("florence2")
    text = {"vocab_size": 360, "d_model": 40, "max_position_embeddings": 192}
    write_florence2(folder, text, seed=0)
    return folder


@pytest.fixture(scope="module")
def defaults(folder: Path) -> ModelDefaults:
    return ModelDefaults(Tokenizer.from_folder(folder), ModelConfig.from_folder(folder))


def asked(**options: Any) -> CaptionOptions:
    return options_from_json(options, CaptionOptions())


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (None, SENTENCES[0]),
        ("caption", SENTENCES[0]),
        ("<DETAILED_CAPTION>", SENTENCES[1]),
        ("more_detailed_caption", SENTENCES[2]),
    ],
)
def test_a_task_is_its_sentence(folder: Path, defaults: ModelDefaults, task: str | None, sentence: str) -> None:
    ids = defaults.resolve(asked(task=task), LIMITS).text_ids
    assert ids == (0, *Tokenizer.from_folder(folder).encode(sentence), 2)


def test_the_servers_task_goes_before_the_models(folder: Path) -> None:
    tokenizer, config = Tokenizer.from_folder(folder), ModelConfig.from_folder(folder)
    own = ModelDefaults(tokenizer, config, "<DETAILED_CAPTION>")
    assert own.tasks == ("detailed_caption", "caption", "more_detailed_caption")
    assert own.resolve(asked(), LIMITS).text_ids == (0, *tokenizer.encode(SENTENCES[1]), 2)
    assert own.resolve(asked(task="caption"), LIMITS).text_ids == (0, *tokenizer.encode(SENTENCES[0]), 2)


@pytest.mark.parametrize("task", ["<OD>", "ocr", "<CAPTION> of it"])
def test_other_tasks_are_refused_by_name(defaults: ModelDefaults, task: str) -> None:
    with pytest.raises(InvalidOption, match="'task' must be one of caption, detailed_caption, more_det"):
        defaults.resolve(asked(task=task), LIMITS)


def test_a_model_without_tasks_refuses_all(demo_folder: Path) -> None:
    plain = ModelDefaults(Tokenizer.from_folder(demo_folder), ModelConfig.from_folder(demo_folder))
    assert plain.tasks == ()
    with pytest.raises(UnsupportedOption, match="one task alone, so leave it out"):
        plain.resolve(asked(task="caption"), LIMITS)
    options = asked(num_beams=2)
    assert plain.resolve(options, LIMITS).params is options.sampling


def test_a_checkpoints_settings_hold_where_a_request_names_none(defaults: ModelDefaults) -> None:
    params = defaults.resolve(asked(), LIMITS).params
    assert (params.num_beams, params.no_repeat_ngram_size, params.early_stopping) == (3, 3, True)
    params = defaults.resolve(asked(num_beams=1, no_repeat_ngram_size=0), LIMITS).params
    assert (params.num_beams, params.no_repeat_ngram_size, params.early_stopping) == (1, 0, True)


def test_beams_that_nobody_asked_for_stand_back(defaults: ModelDefaults) -> None:
    few = Limits(cache_length=32, default_new_tokens=8, eos_ids=frozenset({2}), max_beams=2)
    assert defaults.resolve(asked(), LIMITS, live=True).params.num_beams == 1
    assert defaults.resolve(asked(temperature=0.7), LIMITS).params.num_beams == 1
    assert defaults.resolve(asked(), few).params.num_beams == 2
    assert defaults.resolve(asked(), few).params.fewer_beams
    assert not defaults.resolve(asked(num_beams=2), few).params.fewer_beams
    with pytest.raises(InvalidOption, match="at most 2"):
        defaults.resolve(asked(num_beams=3), few)


def test_a_prompt_stands_behind_the_forced_token(folder: Path, defaults: ModelDefaults) -> None:
    ids = defaults.resolve(asked(prompt="What"), LIMITS).prompt_ids
    assert ids == (0, *Tokenizer.from_folder(folder).encode("What"))


def test_a_task_with_a_token_that_the_model_has_not_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    """As where a tokenizer has learned a word more than the model."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([" shown"])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ConfigError, match=r"= 'detailed_caption': .*' shown' is token 360, and the model has 360 to"
    ):
        ModelDefaults(Tokenizer.from_folder(tmp_path), ModelConfig.from_folder(folder))


def test_an_instruction_with_a_token_that_the_model_has_not_is_refused_at_the_start(tmp_path: Path) -> None:
    write_chat_files(tmp_path)
    random_captioners.smolvlm().save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path, config.chat)
    most = max(tokenizer.prompt_ids(""))
    smaller = replace(config, decoder=replace(config.decoder, vocab_size=most))
    with pytest.raises(
        ConfigError, match=rf"the default instruction cannot be read: .* is token {most}, and the mod"
    ):
        ModelDefaults(tokenizer, smaller)


def test_a_tokenizer_that_cuts_the_sentences_to_pieces_is_refused(folder: Path, tmp_path: Path) -> None:
    """As that of another model would."""
    file = json.loads((folder / "tokenizer.json").read_text())
    file["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=r"its text has .* tokens, the encoder takes 15"):
        ModelDefaults(Tokenizer.from_folder(tmp_path), ModelConfig.from_folder(folder))
