"""Our regions against transformers on random weights: encoder output, greedy tokens, every bucket."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity.parity import TABLE, build_runner, generate, pixel_values, random_images
from support.parity.references import generated_by_pair

from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.slot_request import SlotRequest

NEW_TOKENS = 12

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "96 pixels, patch 16": ({}, {}),
    "224 pixels, patch 32": ({"image_size": 224, "patch_size": 32}, {}),
    "384 pixels, patch 32": ({"image_size": 384, "patch_size": 32}, {}),
    "96 pixels, patch 8": ({"patch_size": 8}, {}),
    "224 pixels, patch 16": ({"image_size": 224}, {}),
    "not square, with a remainder": ({"image_size": [100, 68], "patch_size": [16, 8]}, {}),
    "no qkv bias": ({"qkv_bias": False}, {}),
    "wider encoder": ({"hidden_size": 72}, {}),
    "wider decoder": ({}, {"n_embd": 96}),
    "gelu decoder": ({}, {"activation_function": "gelu"}),
    "gelu_new encoder": ({"hidden_act": "gelu_new"}, {}),
    "relu": ({"hidden_act": "relu"}, {"activation_function": "relu"}),
    "quick_gelu": ({"hidden_act": "quick_gelu"}, {"activation_function": "quick_gelu"}),
    "gelu_fast and silu": ({"hidden_act": "gelu_fast"}, {"activation_function": "silu"}),
    "n_inner": ({}, {"n_inner": 80}),
    "one head": ({"num_attention_heads": 1}, {"n_head": 1}),
    "twelve heads": ({"num_attention_heads": 12}, {"n_head": 12}),
    "unscaled attention": ({}, {"scale_attn_weights": False, "n_embd": 12}),
    "head of its own": ({}, {"tie_word_embeddings": False}),
    "one layer of one, four of the other": ({"num_hidden_layers": 1}, {"n_layer": 4}),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, make_captioner: Callable[..., Any], tmp_path: Path) -> tuple[Any, Path]:
    encoder, decoder = CASES[request.param]
    model = make_captioner(encoder, decoder)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_encoder_output_and_greedy_tokens_equal_transformers(case: tuple[Any, Path]) -> None:
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 2)
    with torch.no_grad():
        expected = model.encoder(pixel_values=pixel_values(images)).last_hidden_state
        output = runner.encode(TABLE.fit(2), images, 0)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=2e-4)
        tokens = generate(runner, images, NEW_TOKENS)
    reference, _ = generated_by_pair(model, images, NEW_TOKENS)
    assert tokens.tolist() == reference
    assert len(set(tokens.flatten().tolist())) > 4, "the random model must not repeat one token"


def test_prompt_is_continued_as_transformers_continues_it(case: tuple[Any, Path]) -> None:
    model, folder = case
    prompt = (17, 4, 60)
    runner = build_runner(folder)
    images = random_images(runner.config, 1)
    with torch.no_grad():
        tokens = generate(runner, images, NEW_TOKENS, prompt)
    assert tokens.tolist() == generated_by_pair(model, images, NEW_TOKENS, prompt)[0]
    assert tuple(tokens[0, :3]) == prompt


def test_a_request_gives_the_same_tokens_alone_and_inside_every_bucket(
    make_captioner: Callable[..., Any], tmp_path: Path
) -> None:
    make_captioner({}, {}).save_pretrained(tmp_path)
    table = BucketTable.of((1, 2, 5, 8))
    runner = build_runner(tmp_path, table)
    wanted, *others = random_images(runner.config, 8)
    with torch.no_grad():
        alone = generate(runner, [wanted], NEW_TOKENS, table=table)[0]
        for rows in range(2, 9):  # full and padded buckets alike
            for place in {0, rows // 2, rows - 1}:
                images = [*others[:place], wanted, *others[place : rows - 1]]
                tokens = generate(runner, images, NEW_TOKENS, table=table)[place]
                assert tokens.tolist() == alone.tolist()


def test_rows_of_different_ages_and_moved_rows_keep_their_tokens(
    make_captioner: Callable[..., Any], tmp_path: Path
) -> None:
    make_captioner({}, {}).save_pretrained(tmp_path)
    runner = build_runner(tmp_path)
    first, second = random_images(runner.config, 2)
    one, two = TABLE.fit(1), TABLE.fit(2)
    with torch.no_grad():
        expected = [generate(runner, [image], NEW_TOKENS)[0].tolist() for image in (first, second)]
        runner.encode(one, [first], 0)
        runner.admit(0, [SlotRequest()])
        ages: list[list[int]] = [[], []]
        for _ in range(4):
            runner.decode_step(one)
            ages[0] += runner.tokens(1)
        runner.encode(one, [second], 1)
        runner.admit(1, [SlotRequest()])
        for _ in range(NEW_TOKENS - 4):
            runner.decode_step(two)
            for row, token in enumerate(runner.tokens(2)):
                ages[row].append(token)
        assert ages[0] == expected[0]
        runner.move([(1, 0)])  # the first is finished: the last running row takes its slot
        for _ in range(4):
            runner.decode_step(one)
            ages[1] += runner.tokens(1)
        assert ages[1] == expected[1]


def test_sharded_files_hold_the_same_weights(make_captioner: Callable[..., Any], tmp_path: Path) -> None:
    model = make_captioner({}, {})
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = build_runner(tmp_path / "whole"), build_runner(tmp_path / "shards")
    images = random_images(whole.config, 2)
    with torch.no_grad():
        assert generate(whole, images, NEW_TOKENS).tolist() == generate(shards, images, NEW_TOKENS).tolist()
