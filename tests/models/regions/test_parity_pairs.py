"""Pairs of a vision-encoder-decoder other than ViT and GPT-2, against transformers on random weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import random_captioners
from support.checkpoints.random_pairs import PAIRS
from support.parity.parity import assert_as_transformers, build_runner, generate, random_images
from support.parity.references import generated_by_pair

NEW_TOKENS = 12
PROMPT = (17, 4, 60)


@pytest.fixture(params=PAIRS, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = random_captioners.pair(*PAIRS[request.param]())
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_encoder_output_and_greedy_tokens_equal_transformers(case: tuple[Any, Path]) -> None:
    model, folder = case
    assert_as_transformers(folder, model.encoder, partial(generated_by_pair, model), NEW_TOKENS)


def test_a_prompt_is_continued_and_padding_changes_nothing(case: tuple[Any, Path]) -> None:
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 3)  # in a bucket of 5
    with torch.no_grad():
        tokens = generate(runner, images, NEW_TOKENS, PROMPT)
    assert tokens.tolist() == generated_by_pair(model, images, NEW_TOKENS, PROMPT)[0]
