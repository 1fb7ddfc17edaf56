"""Florence-2 against transformers on random weights: stages, prefix, logits, tokens of each text, beams."""

import json
import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import random_captioners
from support.parity.beams import florence2_reference, search
from support.parity.parity import TABLE, build_runner, generate, pixel_values, random_images
from support.parity.references import florence2_ids, generated_by_florence2

from snapcap.models.text import EarlyStopping
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import SamplingParams, SlotRequest

NEW_TOKENS = 12
ENDS = (2, 11, 23, 31, 47, 59)
PROMPT = (0, 17, 4, 60)  # begins with the token that is forced where no prompt is
# As long as a text may be, and as short as it may be.
TEXTS = ((0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 2), (0, 44, 2), (0, 21, 22, 23, 24, 25, 2), ())

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "96 pixels, windows beyond the edge": ({}, {}),
    "four stages and windows of 3, as the hub's": (
        {
            "depths": [1, 1, 2, 1],
            "patch_size": [7, 3, 3, 3],
            "patch_stride": [4, 2, 2, 2],
            "patch_padding": [3, 1, 1, 1],
            "patch_prenorm": [False, True, True, True],
            "embed_dim": [8, 16, 32, 64],
            "num_heads": [1, 2, 4, 8],
            "num_groups": [1, 2, 4, 8],
            "window_size": 3,
        },
        {"scale_embedding": True},
    ),
    "one stage, relu, a norm that goes first": (
        {
            "depths": [2],
            "patch_size": [9],
            "patch_stride": [16],
            "patch_padding": [0],
            "patch_prenorm": [True],
            "embed_dim": [32],
            "num_heads": [2],
            "num_groups": [4],
            "activation_function": "gelu_new",
            "mlp_ratio": 2.0,
        },
        {"activation_function": "relu", "encoder_layers": 1, "decoder_layers": 3},
    ),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = random_captioners.florence2(*CASES[request.param])
    model.save_pretrained(tmp_path)
    return model, tmp_path


@torch.no_grad()
def test_every_vision_stage_equals_transformers(case: tuple[Any, Path]) -> None:
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 2)
    tower = model.model.vision_tower
    hidden, theirs = torch.from_numpy(np.stack(images)), pixel_values(images)
    for number, (conv, blocks) in enumerate(zip(tower.convs, tower.blocks, strict=True), 1):
        theirs = conv(theirs)
        for block in blocks:
            theirs = block(theirs)
        for region in runner.regions.encoder[2 * number - 2 : 2 * number]:
            for weights in runner.model.weights.of(region):
                hidden = region.function(hidden, *weights)
        torch.testing.assert_close(hidden, theirs.flatten(2).mT, rtol=1e-4, atol=2e-4)


@torch.no_grad()
def test_the_prefix_and_its_keys_equal_transformers_whatever_is_behind_a_text(case: tuple[Any, Path]) -> None:
    """Rows that are padding write to the scratch slot and nowhere else."""
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 3)  # in a bucket of 5
    before = runner.state.cross_key[:, 4].clone()
    output = runner.encode(TABLE.fit(3), images, 1, [SlotRequest(text=text) for text in TEXTS[:3]])
    for row, text in enumerate(TEXTS[:3]):
        ids = florence2_ids(model, [text])
        pixels = pixel_values(images[row : row + 1])
        theirs = model(input_ids=ids, pixel_values=pixels, decoder_input_ids=torch.tensor([[2]]))
        seen = ids.shape[1]
        torch.testing.assert_close(output[row, :seen], theirs.encoder_last_hidden_state[0], rtol=1e-4, atol=2e-4)
        for layer, cross in enumerate(theirs.past_key_values.cross_attention_cache.layers):
            key = runner.state.cross_key[layer, 1 + row, :, :, :seen].mT
            torch.testing.assert_close(key, cross.keys[0], rtol=1e-4, atol=2e-4)
            value = runner.state.cross_value[layer, 1 + row, :, :seen]
            torch.testing.assert_close(value, cross.values[0], rtol=1e-4, atol=2e-4)
    assert torch.equal(runner.state.cross_key[:, 4], before)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{len(text)} tokens")
@torch.no_grad()
def test_logits_and_greedy_tokens_equal_transformers(case: tuple[Any, Path], text: tuple[int, ...]) -> None:
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 2)
    logits: list[torch.Tensor] = []
    tokens = generate(runner, images, NEW_TOKENS, logits=logits, texts=[text] * 2)
    expected, expected_logits = generated_by_florence2(model, images, NEW_TOKENS, text=text)
    assert tokens.tolist() == expected
    assert set(tokens[:, 0]) == {0}, "the first token is forced"
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected_logits), rtol=1e-4, atol=2e-4)
    if not model.config.text_config.scale_embedding:  # with it a tied head finds the token that was put in
        assert len(set(tokens.flatten().tolist())) > 2, "the model must not repeat one token"
        assert expected[0] != expected[1], "the model must see the image"


@torch.no_grad()
def test_images_of_the_processors_size_equal_transformers(tmp_path: Path) -> None:
    """Whatever the configuration says, which transformers does not ask."""
    model = random_captioners.florence2()
    model.save_pretrained(tmp_path)
    size = {"size": {"height": 64, "width": 64}, "do_center_crop": False}
    processor = {"image_processor_type": "CLIPImageProcessor", **size}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    runner = build_runner(tmp_path)
    images = random_images(runner.config, 2)
    assert images[0].shape == (64, 64, 3)
    model.config.vision_config.image_size = 64  # for the number of placeholders, which a processor would know
    tokens = generate(runner, images, NEW_TOKENS, texts=TEXTS[:1] * 2)
    assert tokens.tolist() == generated_by_florence2(model, images, NEW_TOKENS, text=TEXTS[0])[0]


@torch.no_grad()
def test_a_prompt_is_continued_as_transformers_continues_it(case: tuple[Any, Path]) -> None:
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 3)
    tokens = generate(runner, images, NEW_TOKENS, PROMPT, texts=TEXTS[1:2] * 3)
    assert tokens.tolist() == generated_by_florence2(model, images, NEW_TOKENS, PROMPT, TEXTS[1])[0]
    assert tuple(tokens[0, :4]) == PROMPT


@torch.no_grad()
def test_a_request_gives_the_same_tokens_alone_and_inside_every_bucket(tmp_path: Path) -> None:
    """Whatever texts its neighbours have, and whatever was read in its slot before."""
    random_captioners.florence2().save_pretrained(tmp_path)
    table = BucketTable.of((1, 2, 5, 8))
    runner = build_runner(tmp_path, table)
    wanted, *others = random_images(runner.config, 8)
    texts = [TEXTS[number % 4] for number in range(7)]
    for text in TEXTS[:3]:
        alone = generate(runner, [wanted], NEW_TOKENS, (), table, texts=[text])[0]
        for rows in range(2, 9):  # full and padded buckets alike
            place = rows // 2
            images = [*others[:place], wanted, *others[place : rows - 1]]
            around = [*texts[:place], text, *texts[place : rows - 1]]
            tokens = generate(runner, images, NEW_TOKENS, (), table, texts=around)
            assert tokens[place].tolist() == alone.tolist()


def settings(count: int) -> list[SamplingParams]:
    early: tuple[EarlyStopping, ...] = (True, False, "never")
    matrix = list(product((1, 2, 3, 5, 8), (0.0, 1.0, 2.0), early, (0, 2, 3), (1.0, 1.3)))
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
@pytest.mark.parametrize("forced_end", [2, None], ids=["forced end", "free end"])
def test_beams_equal_transformers(tmp_path: Path, prompt: tuple[int, ...], forced_end: int | None) -> None:
    """With what is forced at the beginning and at the end, by those that end early and by those that do not."""
    model = random_captioners.florence2(seed=2)
    model.generation_config.eos_token_id = list(ENDS)
    model.generation_config.forced_eos_token_id = forced_end
    model.save_pretrained(tmp_path)
    table = BucketTable.of((1, 4, 8))
    runner: Runner = build_runner(tmp_path, table)
    reference = partial(florence2_reference, model)
    images = random_images(runner.config, 4)
    ends = set()
    for number, params in enumerate([SamplingParams(num_beams=3, no_repeat_ngram_size=3), *settings(12)]):
        row = SlotRequest(prompt, params, new_tokens=NEW_TOKENS, text=TEXTS[number % 4])
        (tokens,) = search(runner, table, [(images[number % 4], row)], NEW_TOKENS + len(prompt))
        expected = reference(images[number % 4], row)
        if not params.searches:  # a lone row stops where its tokens are read
            end = next((place for place, token in enumerate(expected) if token in ENDS), len(expected))
            tokens, expected = tokens[:end], expected[:end]
        assert tokens == expected, row
        ends.add(len(expected) == NEW_TOKENS)
    assert ends == {True, False}, "some must end by themselves"
