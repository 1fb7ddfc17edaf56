"""Holds that an option of a caption is declared once: every way to give one follows from the declaration."""

import argparse
from dataclasses import fields
from typing import Literal, get_type_hints

import pytest

from snapcap.service.api.huggingface import PARAMETERS as HUGGING_FACE
from snapcap.service.api.ollama import OPTIONS as OLLAMA
from snapcap.service.api.openai import OPTIONS as OPENAI
from snapcap.service.api.v2 import PARAMETERS as V2
from snapcap.service.captioning.model_defaults import _DEFAULTED
from snapcap.service.captioning.options import (
    OPTIONS,
    CaptionOptions,
    Number,
    OptionValues,
    Switch,
    Text,
    default_of,
    schema,
)
from snapcap.service.config.settings import GROUPS
from snapcap.service.offline.arguments import add_job_arguments
from snapcap.warmup.option import options_of
from snapcap.warmup.runtime.slot_request import SamplingParams

# Not given by requests: the model defaults decide them.
INTERNAL = {"fewer_beams", "biased"}
SAMPLING = {field.name for field in fields(SamplingParams)} - INTERNAL
OWN = {"prompt", "task", "task_text", "timeout", "max_chars", "trim_lead"}


def test_every_field_that_a_request_may_give_is_declared() -> None:
    assert set(OPTIONS) == SAMPLING | OWN
    assert {field.name for field in fields(CaptionOptions)} >= OWN


@pytest.mark.parametrize("name", OPTIONS)
def test_every_way_to_ask_has_the_option(name: str) -> None:
    assert name in HUGGING_FACE
    assert name in V2
    ollama = [field for field, option in OLLAMA.items() if option == name]
    assert ollama == [field for field in (OPTIONS[name].ollama, name) if field]
    assert [field for field, option in OPENAI.items() if option == name] == list(OPTIONS[name].openai or [name])
    parser = argparse.ArgumentParser()
    add_job_arguments(parser)
    shown = {action.dest: action for action in parser._actions}
    servers = {option.name for group in GROUPS.values() for option in options_of(group).values()}
    # A command line has one meaning for a flag, and a run over files has no clients with time limits.
    assert (name in shown) == (name not in servers and name != "timeout")


def test_programs_know_the_type_of_each_option() -> None:
    types = {
        Text(64): str,
        Text(4000): str,
        Text(10_000, is_prompt=True): str,
        Switch("never"): bool | Literal["never"],
        Switch(): bool,
    }
    expected = {
        name: (option.kind.kind if isinstance(option.kind, Number) else types[option.kind]) | None
        for name, option in OPTIONS.items()
    }
    assert get_type_hints(OptionValues) == expected


def test_the_names_of_openai() -> None:
    assert OPENAI["max_tokens"] == OPENAI["max_completion_tokens"] == "max_new_tokens"
    assert OPENAI["min_tokens"] == "min_new_tokens"
    assert OPENAI["max_output_tokens"] == "max_new_tokens"
    assert list(OPENAI).index("max_tokens") < list(OPENAI).index("max_completion_tokens")


def test_help_is_sentences_and_defaults_are_accepted() -> None:
    for name, option in OPTIONS.items():
        assert option.help[0] == option.help[0].upper()
        assert option.help.endswith(".")
        default = default_of(name)
        assert (default is None) == bool(option.default)
        if default is not None:
            assert option.kind.checked(name, default) == default == schema()[name]["default"]


def test_a_checkpoint_sets_what_generation_config_has_of_the_same_name() -> None:
    beams = {"num_beams", "length_penalty", "early_stopping"}
    others = {"no_repeat_ngram_size", "repetition_penalty", "min_length", "min_new_tokens"}
    assert beams | others == _DEFAULTED
