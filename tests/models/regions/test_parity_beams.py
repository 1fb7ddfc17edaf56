"""Beam search, penalties and both together against transformers on random weights, over a matrix of settings."""

import json
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import random_captioners
from support.parity.beams import blip_reference, pair_reference, search
from support.parity.parity import build_runner, random_images

from snapcap.models.text import EarlyStopping
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import SamplingParams, SlotRequest

TABLE = BucketTable.of((1, 4, 8))
NEW_TOKENS = 12  # of a search, and of the reference's rows without one
STEPS = NEW_TOKENS + 4

BEAMS = (2, 3, 4, 5, 8)
LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
EARLY: tuple[EarlyStopping, ...] = (True, False, "never")
NGRAMS = (0, 2, 3)
REPETITION = (1.0, 1.3)
OFTEN = [2, 11, 23, 40, 77]  # a vocabulary with many ends, so that searches end by them
MATRIX = tuple(product(BEAMS, LENGTH_PENALTIES, EARLY, NGRAMS, REPETITION))


def rows_of(count: int, seed: int, prompt: tuple[int, ...]) -> list[SlotRequest]:
    """So many settings of the matrix; others for another seed."""
    chosen = random.Random(seed).sample(MATRIX, count)
    return [
        SlotRequest(
            prompt,
            SamplingParams(
                num_beams=beams,
                length_penalty=length_penalty,
                early_stopping=early,
                no_repeat_ngram_size=ngram,
                repetition_penalty=repetition,
            ),
            new_tokens=NEW_TOKENS,
        )
        for beams, length_penalty, early, ngram, repetition in chosen
    ]


def assert_equal(
    runner: Runner, reference: Callable[[np.ndarray, SlotRequest], list[int]], rows: list[SlotRequest]
) -> list[bool]:
    """Each request alone. Returns which of them ended with an end token."""
    images = random_images(runner.config, 4)
    stopped = []
    for number, row in enumerate(rows):
        image = images[number % 4]
        (tokens,) = search(runner, TABLE, [(image, row)], STEPS)
        if not row.params.searches:
            ends = [at for at, token in enumerate(tokens) if token in runner.config.generation.eos_ids]
            tokens = tokens[: min(NEW_TOKENS, ends[0] + 1 if ends else NEW_TOKENS)]
        assert tokens == reference(image, row), row
        stopped.append(tokens[-1] in runner.config.generation.eos_ids)
    return stopped


@pytest.mark.parametrize(("seed", "prompt"), [(0, ()), (1, (17, 4, 60))], ids=["no prompt", "prompt"])
def test_a_pairs_beams_equal_transformers_over_a_matrix(
    make_captioner: Callable[..., Any], tmp_path: Path, seed: int, prompt: tuple[int, ...]
) -> None:
    model = make_captioner({}, {}, seed=seed, eos_token_id=OFTEN)
    model.save_pretrained(tmp_path)
    runner = build_runner(tmp_path, TABLE)
    stopped = assert_equal(runner, partial(pair_reference, model), rows_of(60, seed, prompt))
    assert 5 < sum(stopped) < 55, "some must end by an end token, and some by length"


def test_more_ends_than_beams_equal_transformers(make_captioner: Callable[..., Any], tmp_path: Path) -> None:
    model = make_captioner({}, {}, seed=3, eos_token_id=[2, *range(20, 44)])
    model.save_pretrained(tmp_path)
    runner = build_runner(tmp_path, TABLE)
    assert any(assert_equal(runner, partial(pair_reference, model), rows_of(12, 6, ())))


def test_a_pair_without_an_end_equals_transformers(make_captioner: Callable[..., Any], tmp_path: Path) -> None:
    model = make_captioner({}, {}, eos_token_id=None)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": []}))
    runner = build_runner(tmp_path, TABLE)
    assert not any(assert_equal(runner, partial(pair_reference, model), rows_of(8, 4, ())))


@pytest.mark.parametrize("prompt", [(), (17, 4, 60)], ids=["no prompt", "prompt"])
def test_blips_beams_equal_transformers_over_a_matrix(tmp_path: Path, prompt: tuple[int, ...]) -> None:
    model = random_captioners.blip(seed=2)
    model.save_pretrained(tmp_path)
    runner = build_runner(tmp_path, TABLE)
    assert_equal(runner, partial(blip_reference, model), rows_of(20, 5, prompt))


def test_penalties_change_greedy_tokens_as_in_transformers(
    make_captioner: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_captioner({}, {}, eos_token_id=OFTEN[:2])
    model.save_pretrained(tmp_path)
    runner = build_runner(tmp_path, TABLE)
    rows = [
        SlotRequest(prompt, SamplingParams(repetition_penalty=penalty, no_repeat_ngram_size=size))
        for prompt, penalty, size in product(((), (17, 4, 17)), (1.0, 1.3, 0.8), (0, 1, 2, 3))
    ]
    assert_equal(runner, partial(pair_reference, model), rows)
    (plain,), (penalised,) = (
        search(runner, TABLE, [(random_images(runner.config, 1)[0], row)], STEPS)
        for row in (rows[0], SlotRequest(params=SamplingParams(no_repeat_ngram_size=1)))
    )
    assert plain != penalised


def test_every_request_of_a_mixed_bucket_gets_what_it_gets_alone(
    make_captioner: Callable[..., Any], tmp_path: Path
) -> None:
    make_captioner({}, {}, eos_token_id=OFTEN).save_pretrained(tmp_path)
    table = BucketTable.of((1, 4, 8, 12))
    runner = build_runner(tmp_path, table)
    images = random_images(runner.config, 5)
    luck = random.Random(3)
    uniforms = [luck.random() for _ in range(48)]
    two, three, five = (
        partial(SamplingParams, num_beams=beams, early_stopping=early)
        for beams, early in zip((2, 3, 5), EARLY, strict=True)
    )
    kinds = [
        SlotRequest((5, 6), three(no_repeat_ngram_size=2), new_tokens=NEW_TOKENS),
        SlotRequest(),
        SlotRequest(params=five(), new_tokens=NEW_TOKENS),
        SlotRequest((), SamplingParams(temperature=1.2, top_k=30), uniforms),
        SlotRequest(params=two(repetition_penalty=1.3), new_tokens=NEW_TOKENS),
        SlotRequest((), SamplingParams(temperature=1.2, repetition_penalty=1.5, no_repeat_ngram_size=2), uniforms),
        SlotRequest((9,), SamplingParams(repetition_penalty=1.4)),
    ]
    asked = [(images[at % 5], kind) for at, kind in enumerate(kinds)]
    alone = [search(runner, table, [each], STEPS)[0] for each in asked]
    for _ in range(12):
        luck.shuffle(order := list(range(len(asked))))
        chosen: list[int] = []
        for number in order:
            if sum(rows_taken(kinds[each]) for each in (*chosen, number)) <= 12:
                chosen.append(number)
        together = search(runner, table, [asked[number] for number in chosen], STEPS)
        assert together == [alone[number] for number in chosen]


def rows_taken(row: SlotRequest) -> int:
    return row.params.num_beams
