"""The demo model: its generator, its captions, its folder, and what it sees."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import snapcap.models.demo
from snapcap.models.demo.training.drawing import paint, write_samples
from snapcap.models.demo.training.scenes import (
    BACKGROUNDS,
    COLOURS,
    COUNTS,
    SEEDS,
    SHAPES,
    SIZES,
    TEXTURES,
    Placed,
    Scene,
    Thing,
    scene_of,
)
from snapcap.models.demo.training.train import Captioner, answers, exact_match

FOLDER = Path(snapcap.models.demo.__file__).parent
SAMPLES: dict[str, str] = json.loads((FOLDER / "samples" / "captions.json").read_text())


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return Captioner.open(FOLDER)


def test_a_seed_gives_one_scene_and_one_picture() -> None:
    first, again, other = scene_of("train", 7), scene_of("train", 7), scene_of("train", 8)
    assert first == again
    assert first != other
    assert np.array_equal(np.asarray(paint(first)), np.asarray(paint(again)))
    assert not np.array_equal(np.asarray(paint(first)), np.asarray(paint(other)))


def test_training_and_held_out_seeds_are_disjoint() -> None:
    train, held_out = SEEDS["train"], SEEDS["held_out"]
    assert train.step == held_out.step == 1
    assert train.stop <= held_out.start
    for index in (0, 12345):
        assert scene_of("train", index).seed in train
        assert scene_of("held_out", index).seed in held_out
    with pytest.raises(IndexError):
        scene_of("train", len(train))


def test_held_out_captions_vary_and_use_only_known_words() -> None:
    captions = {scene_of("held_out", index).caption for index in range(3000)}
    assert len(captions) >= 2000
    words = {*SIZES, *TEXTURES[1:], *COLOURS, *BACKGROUNDS, *COUNTS.values()}
    words |= {*SHAPES, *(shape + "s" for shape in SHAPES), "crosses"} - {"crosss"}
    words |= {"left", "right", "of", "above", "below", "inside", "a", "an", "and", "on"}
    assert {word for caption in captions for word in caption.replace(",", "").split()} <= words


@pytest.mark.parametrize(
    ("dx", "dy", "expected"),
    [
        (-40, 5, "a small red circle left of a large blue star on gray"),
        (40, -5, "a small red circle right of a large blue star on gray"),
        (5, -40, "a small red circle above a large blue star on gray"),
        (-5, 40, "a small red circle below a large blue star on gray"),
    ],
)
def test_a_relation_follows_from_where_things_stand(dx: float, dy: float, expected: str) -> None:
    small, large = Thing("small", "plain", "red", "circle"), Thing("large", "plain", "blue", "star")
    placed = (Placed(large, 48, 48, 21, 0.0), Placed(small, 48 + dx, 48 + dy, 13, 0.0))
    assert Scene(0, "pair", "gray", placed).caption == expected
    assert Scene(0, "pair", "gray", placed[::-1]).caption == expected


def test_things_lie_within_the_picture_and_apart() -> None:
    for index in range(300):
        scene = scene_of("train", index)
        for number, thing in enumerate(scene.placed):
            assert min(thing.x, thing.y) >= thing.radius
            assert max(thing.x, thing.y) <= 96 - thing.radius
            for other in scene.placed[number + 1 :] if scene.kind != "inside" else ():
                assert np.hypot(thing.x - other.x, thing.y - other.y) >= thing.radius + other.radius


def test_captions_tokenise_one_token_a_word_and_come_back(captioner: Captioner) -> None:
    tokenizer = captioner.tokenizer
    for index in range(300):
        caption = scene_of("held_out", index).caption
        ids = tokenizer(caption)["input_ids"]
        assert tokenizer.decode(ids) == caption
        assert len(ids) == len(caption.replace(",", " ,").split())


def test_generation_stops_in_time_with_room_for_a_prompt(captioner: Captioner) -> None:
    defaults, decoder = captioner.model.generation_config, captioner.model.config.decoder
    special = {defaults.decoder_start_token_id, defaults.eos_token_id, defaults.pad_token_id}
    assert len(special) == 3
    longest = max(len(scene_of("train", index).caption.replace(",", " ,").split()) for index in range(2000))
    assert longest + 2 + 8 <= defaults.max_length <= decoder.n_positions


def test_the_weights_are_small_fp32_and_tied(captioner: Captioner) -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 12_000_000
    assert {str(weight.dtype) for weight in captioner.model.parameters()} == {"torch.float32"}
    assert captioner.model.decoder.lm_head.weight is captioner.model.decoder.transformer.wte.weight


def test_every_sample_is_captioned_right(captioner: Captioner) -> None:
    assert {path.name for path in (FOLDER / "samples").glob("*.png")} == set(SAMPLES)
    assert len(SAMPLES) >= 12
    images = [Image.open(FOLDER / "samples" / name).convert("RGB") for name in SAMPLES]
    assert dict(zip(SAMPLES, captioner.captions(images), strict=True)) == SAMPLES


def test_the_samples_are_what_their_script_writes(tmp_path: Path) -> None:
    write_samples(tmp_path)
    assert json.loads((tmp_path / "captions.json").read_text()) == SAMPLES
    assert {path.name for path in tmp_path.glob("*.png")} == set(SAMPLES)


def test_held_out_scenes_are_captioned_right(captioner: Captioner) -> None:
    assert exact_match(list(answers(captioner, 64))) >= 0.95
