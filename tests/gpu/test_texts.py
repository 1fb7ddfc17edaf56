"""Texts that are read together with the image, several in one bucket, in fp32: Florence-2's tasks, with its tokens
and beams, and instructions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity import device_cases
from support.parity.beams import florence2_reference, search
from support.parity.device_cases import Captioner, open_model, open_runner, plan_of

from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.slot_request import SamplingParams, SlotRequest

pytestmark = pytest.mark.timeout(600)  # compiling
NEW_TOKENS = 12
TEXTS = ((0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 2), (0, 44, 2), (0, 21, 22, 23, 24, 25, 2), ())
ASKED = (
    SamplingParams(num_beams=2, no_repeat_ngram_size=3, early_stopping=True),
    SamplingParams(),
    SamplingParams(num_beams=3, early_stopping=True),
    SamplingParams(no_repeat_ngram_size=3),
)


@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_tokens_of_each_text_equal_transformers(
    backend: str, packages: Any, device: torch.device, tmp_path: Path
) -> None:
    """With all that the hub's checkpoints force. Compiled packages are those of the model that forces nothing."""
    captioner = device_cases.florence2(tmp_path, forced=True)
    plan = plan_of(device, "float32", (1, 4, 8) if backend == "eager" else (1, 4))
    model = open_model(captioner, plan)
    runs = EagerBackend() if backend == "eager" else packages.backend("florence2", "float32", model)
    runner = open_runner(model, plan, runs)
    images = captioner.images(4)
    reference = captioner.model.to(device)
    rows = [
        (image, SlotRequest(params=params, text=text, new_tokens=NEW_TOKENS))
        for image, params, text in zip(images, ASKED, TEXTS, strict=True)
    ]
    groups = [rows] if backend == "eager" else [[rows[0]], [rows[1], rows[3]], [rows[2]]]
    for group in groups:
        found = search(runner, plan.table, group, NEW_TOKENS)
        for (image, row), tokens in zip(group, found, strict=True):
            expected = florence2_reference(reference, image, row, NEW_TOKENS)
            if not row.params.searches:  # a lone row stops where its tokens are read
                expected = expected[: expected.index(2)]
            assert tokens[: len(expected)] == expected, row


@pytest.mark.parametrize("family", ["smolvlm", "qwen3-vl"])
@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_tokens_after_each_instruction_equal_transformers(
    backend: str,
    family: str,
    captioners: dict[str, Captioner],
    references: dict[tuple[str, str], Any],
    packages: Any,
    device: torch.device,
) -> None:
    captioner, reference = captioners[family], references[family, "float32"]
    plan = plan_of(device, "float32", (1, 4))
    model = open_model(captioner, plan)
    runs = EagerBackend() if backend == "eager" else packages.backend(family, "float32", model)
    runner = open_runner(model, plan, runs)
    images, most = captioner.images(4), captioner.config.decoder.text_tokens
    longer = tuple(range(20, 21 + most))  # than what an encode reads
    instructions = ((17, 44, 60), (9,), longer, ())
    rows = [SlotRequest(text, prefilled=min(len(text), most)) for text in instructions]
    found = search(runner, plan.table, list(zip(images, rows, strict=True)), NEW_TOKENS + 1)
    for image, text, tokens in zip(images, instructions, found, strict=True):
        (expected,), _ = captioner.generate(reference, [image], len(text) + NEW_TOKENS, text)
        assert tokens[:NEW_TOKENS] == expected[len(text) :], text
