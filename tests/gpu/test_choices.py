"""Sampling and penalties on a GPU: compiled ones give what eager ones do, and nobody waits for the device."""

import random
from typing import Any

import pytest
import torch
from support.parity.beams import search
from support.parity.device_cases import CACHE_LENGTH, Captioner, no_waiting, open_model, open_runner, plan_of

from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.slot_request import Needs, SamplingParams, SlotRequest

pytestmark = pytest.mark.timeout(600)  # compiling
STEPS = 16
KINDS = {
    "sampled": SamplingParams(temperature=1.1),
    "truncated": SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    "penalised": SamplingParams(repetition_penalty=1.4, no_repeat_ngram_size=2),
    "both": SamplingParams(temperature=0.9, repetition_penalty=1.3, no_repeat_ngram_size=1),
}


@pytest.mark.parametrize("family", ["vit-gpt2", "qwen3-vl"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_choices_are_those_of_eager_regions_and_wait_for_nothing(
    kind: str, family: str, captioners: dict[str, Captioner], packages: Any, device: torch.device
) -> None:
    captioner, params, luck = captioners[family], KINDS[kind], random.Random(3)
    plan = plan_of(device, "float32", (1, 4))  # as conftest.SETS; in fp32, where logits are equal to the last bits
    images = captioner.images(3)
    rows = [SlotRequest((), each, [luck.random() for _ in range(CACHE_LENGTH)]) for each in (params,) * 3]
    rows[1] = SlotRequest()  # a greedy one between them
    tokens = []
    for compiled in (True, False):
        model = open_model(captioner, plan)
        runner = open_runner(
            model, plan, packages.backend(family, "float32", model) if compiled else EagerBackend()
        )
        tokens.append(search(runner, plan.table, list(zip(images, rows, strict=True)), STEPS))
        with no_waiting(device):
            for _ in range(4):
                runner.decode_step(Bucket(4), Needs(params.samples, params.penalised))
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]
