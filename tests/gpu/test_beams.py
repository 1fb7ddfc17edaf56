"""Beam search on a GPU: transformers' tokens in fp32, from eager regions and compiled ones, as graphs."""

from typing import Any

import pytest
import torch
from support.parity.beams import chat_reference, pair_reference, search
from support.parity.device_cases import PROMPT, Captioner, open_model, open_runner, plan_of

from snapcap.warmup.runtime.backends.eager import EagerBackend
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


# Of SmolVLM transformers' penalties look at the image's tokens too.
FAMILIES = {
    "vit-gpt2": (pair_reference, ROWS),
    "smolvlm": (chat_reference, [row for row in ROWS if not row.params.penalised]),
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
