"""fp32 on a GPU, without TF32: transformers' greedy tokens, from every bucket, eager and compiled.

Rounding decides between two tokens whose logits are equal: an image with such a step is encoded and not compared.
"""

from typing import Any

import pytest
import torch
from support.parity.device_cases import (
    FEW_BUCKETS,
    PROMPT,
    STEPS,
    Captioner,
    open_model,
    open_runner,
    plan_of,
    steps_with_logits,
)

from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.slot_request import SlotRequest

pytestmark = pytest.mark.timeout(600)  # compiling
BUCKETS = (1, 2, 4, 64)
TIE = 5e-5  # of logits up to 5, whose rounding differs by some 1e-6
CASES = [("vit-gpt2", ()), ("blip", ()), ("blip", PROMPT), ("git", ()), ("git", PROMPT), ("smolvlm", PROMPT)]
CASES += [("llava", PROMPT), ("florence2", ()), ("florence2", PROMPT), ("qwen3-vl", ()), ("qwen3-vl", PROMPT)]


@pytest.mark.parametrize(
    ("family", "prompt"), CASES, ids=lambda case: "with a prompt" if case == PROMPT else str(case or "alone")
)
@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_tokens_equal_transformers_in_every_bucket(
    backend: str,
    family: str,
    prompt: tuple[int, ...],
    captioners: dict[str, Captioner],
    references: dict[tuple[str, str], Any],
    packages: Any,
    device: torch.device,
) -> None:
    captioner, reference = captioners[family], references[family, "float32"]
    plan = plan_of(device, "float32", BUCKETS if backend == "eager" else FEW_BUCKETS)
    model = open_model(captioner, plan)
    if backend == "eager":
        runner = open_runner(model, plan, EagerBackend())
    else:
        runner = open_runner(model, plan, packages.backend(family, "float32", model))
    images = captioner.images(plan.table.largest.size)
    encoded = captioner.encoded(reference, images)
    expected, expected_logits = captioner.generate(reference, images, STEPS, prompt)
    wanted = torch.stack(expected_logits, dim=1).float().cpu()
    assert len({tuple(row) for row in expected}) > len(images) // 2, "the model must see the images"
    best, second = wanted.topk(2).values.unbind(-1)
    certain = [image for image, gap in enumerate((best - second).amin(-1).tolist()) if gap > TIE]
    assert len(certain) >= len(images) - 1, "few images may be left out"
    for bucket in plan.table.buckets:
        for count in {bucket.size, max(1, bucket.size - 1)}:  # full, and with a padding row
            output = captioner.real(runner.encode(bucket, images[:count], 0), images[:count])
            torch.testing.assert_close(output, encoded[:count], rtol=1e-3, atol=1e-3)
            compared = [image for image in certain if image < count]
            for prefilled in (0, len(prompt)) if model.config.decoder.reads_prompt else (0,):
                rows = [SlotRequest(prompt, prefilled=prefilled)] * count
                if prefilled:  # as a server does: the prompt with the image
                    runner.encode(bucket, images[:count], 0, rows)
                tokens, logits = steps_with_logits(runner, bucket, rows, STEPS - prefilled)
                for image in compared:
                    assert tokens[image] == expected[image][prefilled:], f"bucket {bucket.size}"
                logits = logits[:, len(prompt) - prefilled :]
                torch.testing.assert_close(logits[compared], wanted[compared], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_each_bucket_of_rows_takes_pictures_of_each_number_of_tokens(
    backend: str,
    captioners: dict[str, Captioner],
    references: dict[tuple[str, str], Any],
    packages: Any,
    device: torch.device,
) -> None:
    captioner, reference = captioners["qwen3-vl"], references["qwen3-vl", "float32"]
    plan = plan_of(device, "float32", FEW_BUCKETS)
    model = open_model(captioner, plan)
    runs = EagerBackend() if backend == "eager" else packages.backend("qwen3-vl", "float32", model)
    runner = open_runner(model, plan, runs)
    images = captioner.images(8)
    few, many = captioner.config.vision.token_buckets
    for bucket in plan.table.buckets:
        for most, alike in ((few, images[::2]), (many, images[1::2])):
            given = alike[: bucket.size]
            output = runner.encode(bucket, given, 0)
            assert output.shape[1] - captioner.config.encoded_length == most - many, (
                "the fewest tokens that hold all"
            )
            tokens, _ = steps_with_logits(runner, bucket, [SlotRequest()] * len(given), STEPS)
            expected, _ = captioner.generate(reference, given, STEPS, ())
            assert tokens == expected, (bucket.size, most)
