"""BLIP against transformers on random weights: encoder output, greedy tokens with and without a prompt, buckets."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import random_captioners
from support.parity.parity import assert_as_transformers, build_runner, generate, random_images
from support.parity.references import generated_by_blip

from snapcap.warmup.plan.plan import BucketTable

NEW_TOKENS = 12
PROMPT = (17, 4, 60)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "96 pixels": ({}, {}),
    "384 pixels, patch 32": ({"image_size": 384, "patch_size": 32}, {}),
    "wider encoder, as the large one": ({"hidden_size": 72, "intermediate_size": 144, "num_hidden_layers": 3}, {}),
    "wider decoder": ({}, {"hidden_size": 96}),
    "one head": ({"num_attention_heads": 1}, {"num_attention_heads": 1}),
    "twelve heads": ({"num_attention_heads": 12}, {"num_attention_heads": 12}),
    "relu and quick_gelu": ({"hidden_act": "quick_gelu"}, {"hidden_act": "relu"}),
    "large epsilons": ({"layer_norm_eps": 1e-2}, {"layer_norm_eps": 1e-3}),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = random_captioners.blip(*CASES[request.param])
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_encoder_output_and_greedy_tokens_equal_transformers(case: tuple[Any, Path]) -> None:
    model, folder = case
    assert_as_transformers(folder, model.vision_model, partial(generated_by_blip, model), NEW_TOKENS)


def test_a_prompt_is_continued_as_transformers_continues_it(case: tuple[Any, Path]) -> None:
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 1)
    with torch.no_grad():
        tokens = generate(runner, images, NEW_TOKENS, PROMPT)
    assert tokens.tolist() == generated_by_blip(model, images, NEW_TOKENS, PROMPT)[0]
    assert tuple(tokens[0, :3]) == PROMPT


@pytest.mark.parametrize("prompt", [(), PROMPT], ids=["no prompt", "prompt"])
def test_a_request_gives_the_same_tokens_alone_and_inside_every_bucket(
    tmp_path: Path, prompt: tuple[int, ...]
) -> None:
    random_captioners.blip().save_pretrained(tmp_path)
    table = BucketTable.of((1, 2, 5, 8))
    runner = build_runner(tmp_path, table)
    wanted, *others = random_images(runner.config, 8)
    with torch.no_grad():
        alone = generate(runner, [wanted], NEW_TOKENS, prompt, table)[0]
        for rows in range(2, 9):  # full and padded buckets alike
            for place in {0, rows // 2, rows - 1}:
                images = [*others[:place], wanted, *others[place : rows - 1]]
                assert generate(runner, images, NEW_TOKENS, prompt, table)[place].tolist() == alone.tolist()
