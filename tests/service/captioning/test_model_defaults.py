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
from snapcap.models.text import Region
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
    assert own.tasks[:3] == ("detailed_caption", "caption", "more_detailed_caption")
    assert own.resolve(asked(), LIMITS).text_ids == (0, *tokenizer.encode(SENTENCES[1]), 2)
    assert own.resolve(asked(task="caption"), LIMITS).text_ids == (0, *tokenizer.encode(SENTENCES[0]), 2)


@pytest.mark.parametrize("task", ["odd", "<CAPTION> of it", "<>", "<a cat>"])
def test_other_tasks_are_refused_by_name(defaults: ModelDefaults, task: str) -> None:
    with pytest.raises(InvalidOption, match="'task' must be one of caption, detailed_caption, more_det"):
        defaults.resolve(asked(task=task), LIMITS)


def test_a_task_whose_sentence_the_encoder_cannot_take_is_refused_with_what_helps(defaults: ModelDefaults) -> None:
    """The tokenizer cuts the sentence to pieces. A caption's sentence that is too long would stop the start."""
    assert "ocr_with_region" not in defaults.tasks
    with pytest.raises(InvalidOption, match=r"tokens, the encoder takes 15; `--text-tokens \d+` makes room"):
        defaults.resolve(asked(task="<OCR_WITH_REGION>"), LIMITS)


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> ModelDefaults:
    """The defaults of a model that has all tasks, and reads texts of 40 tokens."""
    folder = tmp_path_factory.mktemp("answers")
    text = {"vocab_size": 1500, "d_model": 40, "max_position_embeddings": 192}
    write_florence2(folder, text, seed=0, answers=True)
    return ModelDefaults(Tokenizer.from_folder(folder), ModelConfig.from_folder(folder).with_text_tokens(40))


@pytest.mark.parametrize(
    ("task", "given", "text"),
    [
        ("<OD>", None, "Locate the objects with category name in the image."),
        ("caption_to_phrase_grounding", "  a {input} car ", "Locate the phrases in the caption: a {input} car"),
        ("region_to_ocr", "<loc_1><loc_2>", "What text is in the region <loc_1><loc_2>?"),
        ("free_text", "Where?", "Where?"),
        ("<GENERATE_TAGS>", None, "<GENERATE_TAGS>"),
        ("<DocVQA>", "Who?", "<DocVQA>Who?"),
    ],
)
def test_a_text_has_its_place_in_the_sentence(answering: ModelDefaults, task: str, given: str, text: str) -> None:
    options = asked(task=task, task_text=given)
    ids = answering.resolve(options, LIMITS).text_ids
    assert ids == (0, *answering.tokenizer(None).encode(text), 2)
    wanted = answering.text(options)
    assert wanted in (text, "" if task == "<OD>" else text)
    if wanted:  # another process reads it
        assert answering.resolve(options, LIMITS, text_read=(7, 8)).text_ids == (0, 7, 8, 2)


@pytest.mark.parametrize(
    ("task", "given", "said"),
    [
        ("od", "a cat", "'task_text' must be absent, because the task od takes no text"),
        (None, "a cat", "'task_text' must be absent, because the task caption takes no text"),
        ("region_to_ocr", " ", "'task_text' must be given, because the task region_to_ocr takes a text"),
        ("free_text", None, "'task_text' must be given"),
        (
            "free_text",
            "x" * 50,
            "'task_text' must be a text that the model can read: .*the encoder takes 40; `--text",
        ),
        (f"<{'X' * 60}>", None, "'task' must be a text that the model can read"),
    ],
)
def test_a_text_is_refused_where_it_has_no_place(
    answering: ModelDefaults, task: str | None, given: str | None, said: str
) -> None:
    with pytest.raises(InvalidOption, match=said):
        answering.resolve(asked(task=task, task_text=given), LIMITS)


def test_a_servers_task_may_be_the_checkpoints_own(answering: ModelDefaults, folder: Path, tmp_path: Path) -> None:
    write_florence2(tmp_path, {"vocab_size": 1500, "d_model": 40, "max_position_embeddings": 192}, 0, answers=True)
    tokenizer, config = Tokenizer.from_folder(tmp_path), ModelConfig.from_folder(tmp_path).with_text_tokens(40)
    own = ModelDefaults(tokenizer, config, "<GENERATE_TAGS>")
    assert own.tasks[:2] == ("<GENERATE_TAGS>", "caption")
    assert own.text(asked()) == ""
    assert own.resolve(asked(), LIMITS).text_ids == (0, *tokenizer.encode("<GENERATE_TAGS>"), 2)
    assert own.text(asked(task_text="why?")) == "<GENERATE_TAGS>why?"


def test_an_answer_has_its_marks_and_regions_where_the_task_has_them(answering: ModelDefaults) -> None:
    tokenizer = answering.tokenizer(None)
    tokens = tokenizer.encode("a car<loc_0><loc_0><loc_999><loc_499>")
    answer = {
        task: answering.answer(answering.resolve(asked(task=task), LIMITS), tokens, (1000, 100))
        for task in ("caption", "ocr", "od")
    }
    marked = "a car<loc_0><loc_0><loc_999><loc_499>"
    assert [(each.text, each.regions) for each in answer.values()] == [
        ("a car", None),
        (marked, None),
        (marked, [Region("a car", (0, 0, 999, 49))]),
    ]


def test_a_model_without_tasks_refuses_all(demo_folder: Path) -> None:
    plain = ModelDefaults(Tokenizer.from_folder(demo_folder), ModelConfig.from_folder(demo_folder))
    assert plain.tasks == ()
    for options in (asked(task="caption"), asked(task_text="a cat")):
        with pytest.raises(UnsupportedOption, match="one task alone, so leave it out"):
            plain.resolve(options, LIMITS)
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
    most = max(tokenizer.prompt_ids("").ids)
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
