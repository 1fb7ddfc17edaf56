"""Qwen3-VL against transformers on random weights: grids, vision, DeepStack, prefix, logits, tokens, beams."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.checkpoints.qwen3_vl_files import (
    VISION_END,
    generated,
    model_inputs,
    packed,
    picture,
    qwen3_vl,
    written,
)
from support.parity import device_cases
from support.parity.beams import search
from support.parity.parity import TABLE, build_runner, generate

from snapcap.models.layers import qwen3_vision
from snapcap.models.layers import qwen3_vl as layers
from snapcap.models.layers.llama import frequencies
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import EarlyStopping, SamplingParams, SlotRequest

NEW_TOKENS = 10
PROMPT = (17, 64, 60, 250)
GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 100), (100, 1), (3, 5), (5, 3), (8, 8), (10, 10), (7, 14), (4, 25)]
GRIDS += [(25, 4), (6, 11), (9, 7), (1, 63), (13, 5), (2, 40), (33, 3), (11, 9)]
CASES: dict[str, dict[str, Any]] = {
    "as the published ones": {},
    "tied, one head of keys and values, one tap": {
        "text": {"num_key_value_heads": 1},
        "vision": {"deepstack_visual_indexes": [1]},
        "tie_word_embeddings": True,
    },
    "the last block is tapped, other sections": {
        "vision": {"deepstack_visual_indexes": [1, 2, 3], "num_position_embeddings": 16},
        "text": {
            "head_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 4, 4]},
            "rms_norm_eps": 1e-2,
        },
    },
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = qwen3_vl(seed=1, **CASES[request.param])
    return model, written(model, tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = qwen3_vl(seed=2)
    return model, written(model, tmp_path_factory.mktemp("qwen3-vl"))


def pictures_of(runner: Runner, grids: list[tuple[int, int]]) -> tuple[list[Image.Image], list[np.ndarray]]:
    pictures = [picture(*grid, seed) for seed, grid in enumerate(grids)]
    return pictures, packed(pictures, runner.config.vision.image_tokens)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_computed_from_a_grid_equals_transformers(grid: tuple[int, int]) -> None:
    """Patches behind a picture's own may have any place, as long as the table has it."""
    from transformers.vision_utils import (
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
    )

    rows, columns = grid
    patches = 4 * rows * columns
    thw = torch.tensor([[1, 2 * rows, 2 * columns]])
    ours = torch.tensor([grid])
    places = qwen3_vision.patch_places(ours, patches + 12)
    assert torch.equal(places[0, :patches], get_vision_position_ids(thw, 2))
    table = torch.randn(49, 5)
    indices, weights = get_vision_interpolation_indices_and_weights(
        thw, 7, align_corners=True, spatial_merge_size=2
    )
    expected = (table[indices] * weights[:, :, None]).sum(1)
    found = qwen3_vision.positions(places, ours, table, 7)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0, :patches], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_positions_of_the_decoder_equal_transformers(
    grid: tuple[int, int], ahead: int, shared: tuple[Any, Path]
) -> None:
    """``ahead`` tokens of earlier messages, which are a row's second token and those behind it, stand first."""
    model, _ = shared
    rows, columns = grid
    count, before, after, padding = rows * columns, 3, 6, 9
    kinds = torch.tensor([[0] * (ahead + before) + [1] * count + [0] * after])
    thw = torch.tensor([[1, 2 * rows, 2 * columns]])
    expected, deltas = model.model.get_rope_index(
        torch.zeros_like(kinds), mm_token_type_ids=kinds, image_grid_thw=thw
    )
    tokens = count + padding
    length = before + tokens + ahead + after
    ours = layers.prefix_places(torch.tensor([[*grid, ahead]]), before, tokens, length)[0]
    own = ours[before + tokens :]
    found = torch.cat((own[1 : ahead + 1], ours[: before + count], own[:1], own[ahead + 1 :]))
    assert torch.equal(found, expected[:, 0].T)
    assert before + max(grid) == before + count + int(deltas)


def test_rotations_equal_transformers(shared: tuple[Any, Path]) -> None:
    model, folder = shared
    decoder = build_runner(folder).config.decoder
    places = torch.randint(0, 50, (1, 30, 3))
    turned = qwen3_vision.angles(places, layers._frequencies(decoder))  # type: ignore[arg-type]
    cos, sin = model.model.language_model.rotary_emb(torch.zeros(1), places.permute(2, 0, 1))
    torch.testing.assert_close(turned.cos().repeat(1, 1, 2), cos)
    torch.testing.assert_close(turned.sin().repeat(1, 1, 2), sin)
    assert len(frequencies(decoder.rope, decoder.head_dim)) == 8  # type: ignore[attr-defined]
    cos, _ = model.model.visual.rotary_pos_emb(torch.zeros(1), places[0, :, :2])
    turned = qwen3_vision.angles(places[0, :, :2], qwen3_vision._frequencies(16))
    torch.testing.assert_close(turned.cos().repeat(1, 2), cos)


@torch.no_grad()
def test_vision_prefix_logits_and_tokens_equal_transformers(case: tuple[Any, Path]) -> None:
    """Three shapes in a padded bucket; padding rows write to the scratch slot and nowhere else."""
    model, folder = case
    runner = build_runner(folder)
    prefix, state = runner.config.prefix, runner.state
    pictures, images = pictures_of(runner, [(3, 5), (1, 40), (8, 2)])
    kept = state.cross_key[:, 4].clone(), state.key[:, 4].clone()
    last = runner.encode(TABLE.fit(3), images, 1)
    for row, image in enumerate(pictures):
        given = model_inputs(image, prefix, [VISION_END])
        output = model(**given, use_cache=True, output_hidden_states=True)
        length = given["input_ids"].shape[1] - 1
        seen = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
        features = [level[: length - len(prefix)] for level in state.features[:, 1 + row]]
        torch.testing.assert_close(features, [*seen.deepstack_features], rtol=1e-4, atol=2e-4)
        if len(state.features) < runner.config.decoder.num_layers - 1:  # else transformers' has yet to be added to
            expected = output.hidden_states[-2][0, :length]
            torch.testing.assert_close(last[row, :length], expected, rtol=1e-4, atol=2e-4)
        for layer, cache in enumerate(output.past_key_values.layers):
            keys, values = cache.keys[0, :, :length], cache.values[0, :, :length]
            torch.testing.assert_close(state.cross_key[layer, 1 + row].mT[:, :length], keys, rtol=1e-4, atol=2e-4)
            torch.testing.assert_close(state.cross_value[layer, 1 + row, :, :length], values, rtol=1e-4, atol=2e-4)
    assert torch.equal(state.cross_key[:, 4], kept[0])
    assert torch.equal(state.key[:, 4], kept[1])

    logits: list[torch.Tensor] = []
    tokens = generate(runner, images, NEW_TOKENS, logits=logits).tolist()
    model.generation_config.eos_token_id = None
    for row, image in enumerate(pictures):
        expected, expected_logits = generated(model, image, prefix, [VISION_END], NEW_TOKENS)
        assert tokens[row] == expected
        ours = torch.stack([step[row] for step in logits])
        torch.testing.assert_close(ours, torch.cat(expected_logits), rtol=1e-4, atol=2e-4)
    assert len({tuple(row) for row in tokens}) == 3, "the model must see the image"
    assert len({token for row in tokens for token in row}) > 3, "the model must not repeat one token"
    expected = generated(model, pictures[0], prefix, [VISION_END, *PROMPT], NEW_TOKENS)[0]
    for prefilled in range(5):  # of the start token and the prompt, the last of which a step begins with
        found = generate(runner, images[:1], NEW_TOKENS + 4, PROMPT, prefilled=prefilled).tolist()
        assert found == [[*PROMPT, *expected]]


@pytest.mark.parametrize("read", [0, 4], ids=["steps", "read"])
@torch.no_grad()
def test_tokens_are_the_same_alone_and_in_every_bucket_of_rows_and_tokens(
    shared: tuple[Any, Path], read: int
) -> None:
    table = BucketTable.of((1, 2, 5))
    runner = build_runner(shared[1], table)
    buckets = runner.config.vision.token_buckets
    assert buckets == (64, 128, 141)
    wide = {64: (8, 8), 128: (1, 128), 141: (3, 47)}
    _, (wanted, *others) = pictures_of(runner, [(3, 4), *wide.values()])
    alone = generate(runner, [wanted], NEW_TOKENS, PROMPT, table, prefilled=read)[0].tolist()
    for rows in range(2, 6):  # full and padded buckets alike
        for other in others:
            for place in {0, rows - 1}:
                images = [other] * rows
                images[place] = wanted
                tokens = generate(runner, images, NEW_TOKENS, PROMPT, table, prefilled=read)
                assert tokens[place].tolist() == alone


@torch.no_grad()
def test_messages_before_the_picture_give_transformers_tokens(tmp_path: Path) -> None:
    """Messages of as many tokens as an encode reads beside the start token, and rows with fewer or none."""
    model = qwen3_vl(seed=2)
    model.generation_config.eos_token_id = None
    runner = build_runner(written(model, tmp_path))
    most = runner.config.decoder.text_tokens
    earlier = ((1, 70, 81, 2), tuple(range(60, 59 + most)), ())
    assert len(earlier[1]) == most - 1
    pictures, images = pictures_of(runner, [(3, 5), (1, 40), (8, 2)])
    rows = [
        SlotRequest((*before, *PROMPT), prefilled=min(len(before) + len(PROMPT), most), ahead=len(before))
        for before in earlier
    ]
    found = search(runner, TABLE, list(zip(images, rows, strict=True)), NEW_TOKENS + len(PROMPT))
    prefix, plain = runner.config.prefix, []
    for image, before, tokens in zip(pictures, earlier, found, strict=True):
        expected, _ = generated(model, image, [*before, *prefix], [VISION_END, *PROMPT], NEW_TOKENS)
        assert tokens[:NEW_TOKENS] == expected, before
        plain.append(generated(model, image, prefix, [VISION_END, *PROMPT], NEW_TOKENS)[0] == expected)
    assert plain == [False, False, True], "the messages must count"


@torch.no_grad()
def test_bfloat16_is_within_rounding_of_transformers(tmp_path: Path) -> None:
    """After transformers' own tokens in fp32, from the same rounded weights. fp16's error would be an eighth, and
    that of a wrong position or mask many times as large."""
    captioner = device_cases.qwen3_vl(tmp_path)
    plan = device_cases.plan_of(torch.device("cpu"), "bfloat16", (4,))
    runner = device_cases.open_runner(device_cases.open_model(captioner, plan), plan, EagerBackend())
    reference = captioner.model
    for parameter in reference.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    images = captioner.images(4)
    expected, logits = captioner.generate(reference, images, NEW_TOKENS, ())
    wanted = torch.stack(logits, dim=1)
    runner.encode(plan.table.largest, images, 0)
    rows = [SlotRequest(tuple(tokens)) for tokens in expected]
    tokens, ours = device_cases.steps_with_logits(runner, plan.table.largest, rows, NEW_TOKENS)
    assert tokens == expected
    error = (ours - wanted).abs().amax(-1) / wanted.abs().amax(-1)
    assert 0 < error.max() <= 8 * torch.finfo(torch.bfloat16).eps


@torch.no_grad()
def test_moved_rows_take_their_grid_with_them(shared: tuple[Any, Path]) -> None:
    runner = build_runner(shared[1])
    _, images = pictures_of(runner, [(5, 5), (1, 7)])
    alone = generate(runner, images[1:], NEW_TOKENS, prefilled=0)[0].tolist()
    rows = [SlotRequest()] * 2
    runner.encode(TABLE.fit(2), images, 0, rows)
    runner.admit(0, rows)
    tokens = []
    for step in range(NEW_TOKENS):
        if step == 3:
            runner.move([(1, 0)])
        runner.decode_step(TABLE.fit(2 if step < 3 else 1))
        tokens.append(runner.tokens(2 if step < 3 else 1)[-1])
    assert tokens == alone


def settings(count: int) -> list[SamplingParams]:
    early: tuple[EarlyStopping, ...] = (True, False, "never")
    matrix = list(product((2, 3, 5), (0.0, 1.0, 2.0), early))
    return [
        SamplingParams(num_beams=beams, length_penalty=penalty, early_stopping=stop)
        for beams, penalty, stop in random.Random(7).sample(matrix, count)
    ]


@pytest.mark.parametrize("read", [0, 4], ids=["steps", "read"])
def test_beams_equal_transformers(tmp_path: Path, read: int) -> None:
    model = qwen3_vl(seed=2)
    model.generation_config.eos_token_id = [5, 11, 23]
    table = BucketTable.of((1, 5))
    runner = build_runner(written(model, tmp_path), table)
    pictures, images = pictures_of(runner, [(3, 5), (2, 2), (1, 9)])
    for number, params in enumerate(settings(6)):
        row = SlotRequest(PROMPT, params, new_tokens=NEW_TOKENS, prefilled=read)
        (tokens,) = search(runner, table, [(images[number % 3], row)], NEW_TOKENS + 5)
        expected, _ = generated(
            model,
            pictures[number % 3],
            runner.config.prefix,
            [VISION_END, *PROMPT],
            NEW_TOKENS,
            num_beams=params.num_beams,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        assert tokens == expected, row
