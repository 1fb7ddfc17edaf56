"""GIT against transformers on random weights: prefix, logits, tokens with and without a prompt, beams."""

import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import random_captioners
from support.parity.beams import git_reference, search
from support.parity.parity import TABLE, build_runner, generate, pixel_values, random_images
from support.parity.references import generated_by_git

from snapcap.models.text import EarlyStopping
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import SamplingParams, SlotRequest

NEW_TOKENS = 12
PROMPT = (17, 4, 60)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "96 pixels": ({}, {}),
    "patch 14, a wider encoder, as the large one": (
        {"image_size": 98, "patch_size": 14, "hidden_size": 72, "num_hidden_layers": 3},
        {},
    ),
    "wider decoder of three layers": ({}, {"hidden_size": 96, "num_hidden_layers": 3}),
    "one layer, one head": ({"num_attention_heads": 1}, {"num_attention_heads": 1, "num_hidden_layers": 1}),
    "relu and a tied head": ({"hidden_act": "gelu"}, {"hidden_act": "relu", "tie_word_embeddings": True}),
    "large epsilons": ({"layer_norm_eps": 1e-2}, {"layer_norm_eps": 1e-3}),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = random_captioners.git(*CASES[request.param])
    model.save_pretrained(tmp_path)
    return model, tmp_path


def image_states(
    model: Any, images: list[np.ndarray]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """What the last layer takes of the image's tokens, and all layers' keys and values of them."""
    tokens = model.git.image_encoder.vision_model.embeddings.num_positions
    start = torch.full((len(images), 1), random_captioners.START)
    output = model(start, pixel_values=pixel_values(images), use_cache=True, output_hidden_states=True)
    layers = [(layer.keys[:, :, :tokens], layer.values[:, :, :tokens]) for layer in output.past_key_values.layers]
    keys, values = ([pair[part] for pair in layers] for part in (0, 1))
    return output.hidden_states[len(layers) - 1][:, :tokens], keys, values


@torch.no_grad()
def test_the_prefix_of_every_layer_equals_transformers(case: tuple[Any, Path]) -> None:
    """Rows that are padding write to the scratch slot and nowhere else."""
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 3)  # in a bucket of 5
    before = runner.state.cross_key[:, 4].clone()
    states, keys, values = image_states(model, images)
    output = runner.encode(TABLE.fit(3), images, 1)
    torch.testing.assert_close(output[:3], states, rtol=1e-4, atol=2e-4)
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        torch.testing.assert_close(runner.state.cross_key[layer, 1:4].mT, key, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(runner.state.cross_value[layer, 1:4], value, rtol=1e-4, atol=2e-4)
    assert torch.equal(runner.state.cross_key[:, 4], before)


@torch.no_grad()
def test_logits_and_greedy_tokens_equal_transformers(case: tuple[Any, Path]) -> None:
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 2)
    logits: list[torch.Tensor] = []
    tokens = generate(runner, images, NEW_TOKENS, logits=logits)
    expected, expected_logits = generated_by_git(model, images, NEW_TOKENS)
    assert tokens.tolist() == expected
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected_logits), rtol=1e-4, atol=2e-4)
    assert len(set(tokens.flatten().tolist())) > 2, "the model must not repeat one token"
    assert expected[0] != expected[1], "the model must see the image"


@torch.no_grad()
def test_a_prompt_is_continued_as_transformers_continues_it(case: tuple[Any, Path]) -> None:
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 3)
    tokens = generate(runner, images, NEW_TOKENS, PROMPT)
    assert tokens.tolist() == generated_by_git(model, images, NEW_TOKENS, PROMPT)[0]
    assert tuple(tokens[0, :3]) == PROMPT


@pytest.mark.parametrize("prompt", [(), PROMPT], ids=["no prompt", "prompt"])
@torch.no_grad()
def test_a_request_gives_the_same_tokens_alone_and_inside_every_bucket(
    tmp_path: Path, prompt: tuple[int, ...]
) -> None:
    random_captioners.git().save_pretrained(tmp_path)
    table = BucketTable.of((1, 2, 5, 8))
    runner = build_runner(tmp_path, table)
    wanted, *others = random_images(runner.config, 8)
    alone = generate(runner, [wanted], NEW_TOKENS, prompt, table)[0]
    for rows in range(2, 9):  # full and padded buckets alike
        for place in {0, rows // 2, rows - 1}:
            images = [*others[:place], wanted, *others[place : rows - 1]]
            assert generate(runner, images, NEW_TOKENS, prompt, table)[place].tolist() == alone.tolist()


def settings(count: int) -> list[SamplingParams]:
    early: tuple[EarlyStopping, ...] = (True, False, "never")
    matrix = list(product((2, 3, 5, 8), (0.0, 1.0, 2.0), early, (0, 2), (1.0, 1.3)))
    return [
        SamplingParams(
            num_beams=beams,
            length_penalty=length_penalty,
            early_stopping=stop,
            no_repeat_ngram_size=ngram,
            repetition_penalty=repetition,
        )
        for beams, length_penalty, stop, ngram, repetition in random.Random(7).sample(matrix, count)
    ]


@pytest.mark.parametrize("prompt", [(), PROMPT], ids=["no prompt", "prompt"])
def test_beams_equal_transformers(tmp_path: Path, prompt: tuple[int, ...]) -> None:
    """Beams copy what they have cached of their own; the image's K/V is that of the whole group."""
    model = random_captioners.git(text={"eos_token_id": [2, 11, 23]}, seed=2)
    model.save_pretrained(tmp_path)
    table = BucketTable.of((1, 4, 8))
    runner: Runner = build_runner(tmp_path, table)
    reference = partial(git_reference, model)
    images = random_images(runner.config, 4)
    for number, params in enumerate(settings(12)):
        row = SlotRequest(prompt, params, new_tokens=NEW_TOKENS)
        (tokens,) = search(runner, table, [(images[number % 4], row)], NEW_TOKENS + 4)
        assert tokens == reference(images[number % 4], row), row
