"""Beam search, penalties and both together against transformers on random weights, over a matrix of settings."""

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.beams import search
from support.parity import build_runner, pixel_values, random_images

from warmup.buckets import BucketTable
from warmup.row import EarlyStopping, Row, Search
from warmup.runner import Runner

TABLE = BucketTable.of((1, 4, 8))
NEW_TOKENS = 12
STEPS = NEW_TOKENS + 4

BEAMS = (2, 3, 4, 5, 8)
LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
EARLY: tuple[EarlyStopping, ...] = ("true", "false", "never")
NGRAMS = (0, 2, 3)
REPETITION = (1.0, 1.3)
MATRIX = tuple(product(BEAMS, LENGTH_PENALTIES, EARLY, NGRAMS, REPETITION))


def rows_of(count: int, seed: int, prompt: tuple[int, ...]) -> list[Row]:
    """So many settings of the matrix, and others each time a seed is."""
    chosen = random.Random(seed).sample(MATRIX, count)
    return [
        Row(
            prompt,
            repetition_penalty=repetition,
            no_repeat_ngram_size=ngram,
            search=Search(beams, NEW_TOKENS, length_penalty, early),
        )
        for beams, length_penalty, early, ngram, repetition in chosen
    ]


def settings(row: Row) -> dict[str, Any]:
    """What transformers calls a row's options."""
    assert row.search is not None
    early = {"true": True, "false": False, "never": "never"}[row.search.early_stopping]
    return {
        "num_beams": row.search.num_beams,
        "length_penalty": row.search.length_penalty,
        "early_stopping": early,
        "no_repeat_ngram_size": row.no_repeat_ngram_size,
        "repetition_penalty": row.repetition_penalty,
        "max_new_tokens": row.search.new_tokens,
        "do_sample": False,
    }


def pair_reference(model: Any, image: np.ndarray, row: Row) -> list[int]:
    start = torch.tensor([[model.generation_config.decoder_start_token_id, *row.prompt]])
    output = model.generate(pixel_values([image]), decoder_input_ids=start, **settings(row))
    return output[0, start.shape[1] :].tolist()


def blip_reference(model: Any, image: np.ndarray, row: Row) -> list[int]:
    ids = torch.tensor([[1, *row.prompt, 2]]) if row.prompt else None
    output = model.generate(pixel_values([image]), input_ids=ids, **settings(row))
    return output[0, 1 + len(row.prompt) :].tolist()


def assert_equal(
    runner: Runner,
    reference: Callable[[np.ndarray, Row], list[int]],
    rows: list[Row],
    ends: tuple[int, ...] | None = None,
) -> tuple[int, int]:
    """Each setting alone. Returns how many ended by an end token, and how many by length."""
    images = random_images(runner.config, 4)
    stopped = 0
    ends = runner.config.generation.eos_ids if ends is None else ends
    for number, row in enumerate(rows):
        image = images[number % 4]
        (tokens,) = search(runner, TABLE, [(image, row)], STEPS)
        assert tokens == reference(image, row), row
        stopped += tokens[-1] in ends
    return stopped, len(rows) - stopped


@pytest.mark.parametrize("prompt", [(), (17, 4, 60)], ids=["no prompt", "prompt"])
@pytest.mark.parametrize("seed", range(3))
def test_beams_equal_transformers_over_a_matrix(
    make_captioner: Callable[..., Any], tmp_path: Path, seed: int, prompt: tuple[int, ...]
) -> None:
    # Frequent ends: several of the vocabulary are an end.
    model = make_captioner({}, {}, seed=seed, eos_token_id=[2, 11, 23, 40, 77])
    model.save_pretrained(tmp_path)
    runner = build_runner(tmp_path, TABLE)
    rows = rows_of(40, seed, prompt)
    stopped, at_length = assert_equal(runner, lambda image, row: pair_reference(model, image, row), rows)
    print(stopped, at_length)
