"""SmolVLM, Idefics3 and LLaVA against transformers on random weights: vision, prefix, logits, tokens, beams."""

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import random_captioners
from support.checkpoints.chat_files import LLAVA_TEMPLATE, TEMPLATE, write_chat_files
from support.parity.beams import chat_reference, search
from support.parity.parity import TABLE, build_runner, generate, random_images
from support.parity.references import chat_pixels, chat_prompt, generated_by_chat

from snapcap.models.layers.siglip import bucketed_positions
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import EarlyStopping, SamplingParams, SlotRequest

NEW_TOKENS = 12
PROMPT = (17, 64, 60, 250)

CASES: dict[str, dict[str, Any]] = {
    "smolvlm": {},
    "idefics3, 27 patches a side in squares of 3, as 2.2B": {
        "idefics3": True,
        "vision": {"image_size": 384, "patch_size": 14},
        "scale_factor": 3,
    },
    "heads wider than the model, all of keys and values": {
        "text": {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 4},
    },
    "one layer, one head of keys and values, tied": {
        "text": {"num_hidden_layers": 1, "num_key_value_heads": 1},
        "tie_word_embeddings": True,
    },
    "other frequencies, as Llama 3": {
        "text": {"rope_parameters": random_captioners.LLAMA3},
    },
    "large epsilons, 25 patches a side, of which two have one position": {
        "vision": {"layer_norm_eps": 1e-2, "image_size": 200, "patch_size": 8},
        "text": {"rms_norm_eps": 1e-2},
        "scale_factor": 5,
    },
}
LLAVA_CASES: dict[str, dict[str, Any]] = {
    "llava with CLIP, the last layer but one without its class token": {},
    "llava with SigLIP, all tokens, a remainder of the image that is not seen, as JoyCaption": {
        "tower": "Siglip",
        "vision": {"image_size": 104, "num_hidden_layers": 2},
        "vision_feature_select_strategy": "full",
    },
    "llava with SigLIP without its first token, of the last layer, tied": {
        "tower": "Siglip",
        "vision": {"num_hidden_layers": 1},
        "vision_feature_layer": -1,
        "tie_word_embeddings": True,
    },
    "llava with CLIP, the first layer, its class token, other activations, no bias": {
        "vision": {"hidden_act": "gelu"},
        "vision_feature_layer": 1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "silu",
        "multimodal_projector_bias": False,
    },
}
MODELS = {name: partial(random_captioners.smolvlm, **case) for name, case in CASES.items()}
MODELS |= {name: partial(random_captioners.llava, **case) for name, case in LLAVA_CASES.items()}


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = MODELS[request.param]()
    return model, written(model, tmp_path)


def written(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    write_chat_files(folder, LLAVA_TEMPLATE if model.config.model_type == "llava" else TEMPLATE)
    return folder


@torch.no_grad()
def test_vision_prefix_logits_and_tokens_equal_transformers(case: tuple[Any, Path]) -> None:
    """Rows that are padding write to the scratch slot and nowhere else."""
    model, folder = case
    runner = build_runner(folder)
    images = random_images(runner.config, 3)  # in a bucket of 5
    before = runner.state.cross_key[:, 4].clone()
    own = runner.state.key[:, 4].clone()
    prompt = torch.tensor([chat_prompt(model)] * 3)
    pixels = chat_pixels(model, images)
    output = model(input_ids=prompt, pixel_values=pixels, use_cache=True, output_hidden_states=True)
    length = runner.config.prefix_length
    assert length == prompt.shape[1] - 1
    last = runner.encode(TABLE.fit(3), images, 1)
    torch.testing.assert_close(last[:3, :length], output.hidden_states[-2][:, :length], rtol=1e-4, atol=2e-4)
    for layer, cache in enumerate(output.past_key_values.layers):
        keys, values = cache.keys[:, :, :length], cache.values[:, :, :length]
        torch.testing.assert_close(runner.state.cross_key[layer, 1:4].mT, keys, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(runner.state.cross_value[layer, 1:4], values, rtol=1e-4, atol=2e-4)
    assert torch.equal(runner.state.cross_key[:, 4], before)
    assert torch.equal(runner.state.key[:, 4], own)

    logits: list[torch.Tensor] = []
    tokens = generate(runner, images, NEW_TOKENS, logits=logits)
    expected, expected_logits = generated_by_chat(model, images, NEW_TOKENS)
    assert tokens.tolist() == expected
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected_logits), rtol=1e-4, atol=2e-4)
    assert len(set(tokens.flatten().tolist())) > 2, "the model must not repeat one token"
    assert expected[0] != expected[1], "the model must see the image"
    expected = generated_by_chat(model, images, NEW_TOKENS, PROMPT)[0]
    assert tuple(expected[0][:4]) == PROMPT
    for prefilled in range(5):  # of the start token and the prompt, the last of which a step begins with
        assert generate(runner, images, NEW_TOKENS, PROMPT, prefilled=prefilled).tolist() == expected


@pytest.mark.parametrize("cache_length", [24, 48], ids=["a cache shorter than what an encode reads", ""])
@torch.no_grad()
def test_a_prompt_longer_than_what_an_encode_reads_goes_on_step_by_step(tmp_path: Path, cache_length: int) -> None:
    model = random_captioners.smolvlm()
    runner = build_runner(written(model, tmp_path), cache_length=cache_length)
    images = random_images(runner.config, 2)
    read = min(runner.config.decoder.text_tokens, cache_length - 4)
    prompt = tuple(range(60, 60 + cache_length - 6))
    tokens = generate(runner, images, cache_length - 1, prompt, prefilled=min(read, len(prompt)))
    assert tokens.tolist() == generated_by_chat(model, images, cache_length - 1, prompt)[0]


@pytest.mark.parametrize("captioner", [random_captioners.smolvlm, random_captioners.llava])
@pytest.mark.parametrize(("prompt", "read"), [((), 0), (PROMPT, 0), (PROMPT, 4)], ids=["none", "steps", "read"])
@torch.no_grad()
def test_a_request_gives_the_same_tokens_alone_and_inside_every_bucket(
    tmp_path: Path, prompt: tuple[int, ...], read: int, captioner: Callable[[], Any]
) -> None:
    table = BucketTable.of((1, 2, 5, 8))
    runner = build_runner(written(captioner(), tmp_path), table)
    wanted, *others = random_images(runner.config, 8)
    alone = generate(runner, [wanted], NEW_TOKENS, prompt, table, prefilled=read)[0]
    for rows in range(2, 9):  # full and padded buckets alike
        for place in {0, rows // 2, rows - 1}:
            images = [*others[:place], wanted, *others[place : rows - 1]]
            tokens = generate(runner, images, NEW_TOKENS, prompt, table, prefilled=read)
            assert tokens[place].tolist() == alone.tolist()


def settings(count: int) -> list[SamplingParams]:
    early: tuple[EarlyStopping, ...] = (True, False, "never")
    matrix = list(product((2, 3, 5, 8), (0.0, 1.0, 2.0), early))
    return [
        SamplingParams(num_beams=beams, length_penalty=penalty, early_stopping=stop)
        for beams, penalty, stop in random.Random(7).sample(matrix, count)
    ]


@pytest.mark.parametrize("captioner", [random_captioners.smolvlm, random_captioners.llava])
@pytest.mark.parametrize(("prompt", "read"), [((), 0), (PROMPT, 0), (PROMPT, 4)], ids=["none", "steps", "read"])
def test_beams_equal_transformers(
    tmp_path: Path, prompt: tuple[int, ...], read: int, captioner: Callable[..., Any]
) -> None:
    """Beams copy what they have cached of their own; the prefix's K/V is that of the whole group."""
    model = captioner(seed=2)
    model.generation_config.eos_token_id = [5, 11, 23]
    table = BucketTable.of((1, 4, 8))
    runner: Runner = build_runner(written(model, tmp_path), table)
    images = random_images(runner.config, 4)
    for number, params in enumerate(settings(8)):
        row = SlotRequest(prompt, params, new_tokens=NEW_TOKENS, prefilled=read)
        (tokens,) = search(runner, table, [(images[number % 4], row)], NEW_TOKENS + 5)
        assert tokens == chat_reference(model, images[number % 4], row), row


def test_some_numbers_of_patches_give_two_of_them_one_position() -> None:
    rows = bucketed_positions((25, 25)).view(25, 25)[:, 0] // 25
    assert len({*rows.tolist()}) < 25
    assert bucketed_positions((32, 32)).tolist() == list(range(1024))
