"""Beam search on a GPU: transformers' tokens in fp32, from eager regions and compiled ones, as graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.parity.beams import chat_reference, pair_reference, qwen3_vl_reference, search
from support.parity.device_cases import PROMPT, Captioner, open_model, open_runner, plan_of

from snapcap.models.families.generation import read_settings
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.slot_request import SamplingParams, SlotRequest

pytestmark = pytest.mark.timeout(600)  # compiling
NEW_TOKENS = 14
STEPS = NEW_TOKENS + len(PROMPT)
ROWS = (
    SlotRequest(params=SamplingParams(num_beams=2), new_tokens=NEW_TOKENS),
    SlotRequest(
        params=SamplingParams(num_beams=3, length_penalty=2.0, early_stopping="never", no_repeat_ngram_size=2),
        new_tokens=NEW_TOKENS,
    ),
    SlotRequest(PROMPT, SamplingParams(num_beams=4, early_stopping=True), new_tokens=NEW_TOKENS),
    SlotRequest(
        params=SamplingParams(num_beams=4, length_penalty=0.5, repetition_penalty=1.3), new_tokens=NEW_TOKENS
    ),
    SlotRequest(params=SamplingParams(repetition_penalty=1.3, no_repeat_ngram_size=1)),
)


# transformers' penalties look at the image's tokens of SmolVLM and Qwen3-VL too.
FAMILIES = {
    "vit-gpt2": (pair_reference, ROWS),
    "smolvlm": (chat_reference, [row for row in ROWS if not row.params.penalised]),
    "qwen3-vl": (qwen3_vl_reference, [row for row in ROWS if not row.params.penalised]),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_searches_equal_transformers(
    backend: str,
    family: str,
    captioners: dict[str, Captioner],
    references: dict[tuple[str, str], Any],
    packages: Any,
    device: torch.device,
) -> None:
    captioner, reference = captioners[family], references[family, "float32"]
    expected_of, rows = FAMILIES[family]
    plan = plan_of(device, "float32", (1, 4))
    model = open_model(captioner, plan)
    if backend == "eager":
        runner = open_runner(model, plan, EagerBackend())
    else:
        runner = open_runner(model, plan, packages.backend(family, "float32", model))
    for image in captioner.images(4):
        for row in rows:
            (tokens,) = search(runner, plan.table, [(image, row)], STEPS)
            ends = list(captioner.config.generation.eos_ids)
            expected = expected_of(reference, image, row, NEW_TOKENS, eos_token_id=ends)
            assert tokens[: len(expected)] == expected, row


# What a checkpoint may say of its tokens, as transformers calls it; the greedy tokens have some of these.
# The end is made likelier only where it is allowed: transformers would make NaN of a score of −∞.
RULES = {
    "suppress_tokens": [*range(40, 60)],
    "begin_suppress_tokens": [*range(60, 200)],
    "bad_words_ids": [[token] for token in range(5, 12)] + [[token, 200 + token] for token in range(60)],
    "sequence_bias": [[[token], token / 100 - 2] for token in range(100, 320)] + [[[210, 211], -3.0]],
    "exponential_decay_length_penalty": [10, 1.1],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_a_checkpoints_rules_give_the_tokens_of_transformers(
    backend: str,
    family: str,
    captioners: dict[str, Captioner],
    references: dict[tuple[str, str], Any],
    packages: Any,
    device: torch.device,
) -> None:
    captioner, reference = captioners[family], references[family, "float32"]
    ends = captioner.config.generation.eos_ids
    ruled = read_settings(RULES, ends, captioner.config.decoder.vocab_size)
    generation = replace(captioner.config.generation, **ruled)
    captioner = replace(captioner, config=replace(captioner.config, generation=generation))
    plan = plan_of(device, "float32", (1, 4))
    model = open_model(captioner, plan)
    compiled = packages.backend(family, "float32", model) if backend == "aot" else EagerBackend()
    runner = open_runner(model, plan, compiled)
    rows = [
        SlotRequest(prompt, replace(each, biased=True), new_tokens=NEW_TOKENS)
        for prompt in ((), PROMPT)
        for each in (SamplingParams(min_new_tokens=9), SamplingParams(num_beams=3, min_new_tokens=4))
    ]
    for image in captioner.images(3):
        for row in rows:
            more = {**RULES, "min_new_tokens": row.params.min_new_tokens, "eos_token_id": [*ends]}
            expected = FAMILIES[family][0](reference, image, row, NEW_TOKENS, **more)
            (tokens,) = search(runner, plan.table, [(image, row)], STEPS)
            assert tokens[: len(expected)] == expected, row
            plain = replace(row, params=replace(row.params, biased=False, min_new_tokens=None))
            assert FAMILIES[family][0](reference, image, plain, NEW_TOKENS, eos_token_id=[*ends]) != expected


def test_a_search_beside_others_gives_what_it_gives_alone(
    captioners: dict[str, Captioner], device: torch.device
) -> None:
    captioner = captioners["vit-gpt2"]
    plan = plan_of(device, "float32", (1, 4, 16))
    runner = open_runner(open_model(captioner, plan), plan, EagerBackend())
    asked = list(zip(captioner.images(5), ROWS, strict=True))
    asked.insert(2, (captioner.images(6)[5], SlotRequest()))
    alone = [search(runner, plan.table, [each], STEPS)[0] for each in asked]
    assert search(runner, plan.table, asked, STEPS) == alone
