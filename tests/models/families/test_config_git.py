"""GIT's configurations: shapes, special tokens and lengths as in transformers, refusals by name; shared weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import random_captioners
from support.parity.parity import NORMALISATION, weight_bytes

from snapcap.models.config import ConfigError, ModelConfig
from snapcap.models.dimensions import ClipConfig, GitConfig
from snapcap.models.regions.table import build_regions
from snapcap.models.weights.load import load_weights

# As on the hub, of what transformers 4 wrote those fields that matter.
GIT_LARGE: dict[str, Any] = {
    "architectures": ["GitForCausalLM"],
    "bos_token_id": 101,
    "eos_token_id": 102,
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 1024,
    "model_type": "git",
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "num_image_with_embedding": None,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_act": "quick_gelu",
        "hidden_size": 1024,
        "image_size": 224,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-05,
        "model_type": "git_vision_model",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
    "vocab_size": 30522,
}


def read(folder: Path, changes: dict[str, Any], base: dict[str, Any] = GIT_LARGE) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**base, **changes}))
    return ModelConfig.from_folder(folder)


def test_git_large_as_on_the_hub(tmp_path: Path) -> None:
    config = read(tmp_path, {})
    assert isinstance(config.vision, ClipConfig)
    assert isinstance(config.decoder, GitConfig)
    assert (config.vision.output_shape, config.vision.num_layers, config.vision.num_heads) == ((257, 1024), 24, 16)
    assert (config.decoder.head_dim, config.decoder.num_layers, config.decoder.tied_head) == (64, 6, False)
    generation = config.generation
    assert (generation.start_id, generation.eos_ids, generation.pad_id, generation.max_length) == (
        101,
        (102,),
        0,
        21,
    )
    regions = build_regions(config)
    assert [(region.name, region.component, region.layers) for region in regions][:8] == [
        ("encoder_before", "encoder", 1),
        ("encoder_block", "encoder", 24),
        ("prefix_before", "encoder", 1),
        ("prefix_block", "encoder", 5),
        ("prefix_after", "encoder", 1),
        ("decoder_before", "decoder", 1),
        ("decoder_block", "decoder", 6),
        ("decoder_after", "decoder", 1),
    ]


def test_what_a_file_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    theirs = transformers.GitConfig()
    config = read(tmp_path, {}, {"model_type": "git", "vision_config": {}})
    vision, text = config.vision, config.decoder
    assert (vision.image_size[0], vision.patch_size[0]) == (
        theirs.vision_config.image_size,
        theirs.vision_config.patch_size,
    )
    for ours, other in ((vision, theirs.vision_config), (text, theirs)):
        assert (ours.hidden_size, ours.num_layers) == (other.hidden_size, other.num_hidden_layers)
        assert (ours.num_heads, ours.activation) == (other.num_attention_heads, other.hidden_act)
        assert ours.layer_norm_eps == other.layer_norm_eps
    assert (text.vocab_size, text.n_positions, text.inner_size, text.tied_head) == (
        theirs.vocab_size,
        theirs.max_position_embeddings,
        theirs.intermediate_size,
        theirs.tie_word_embeddings,
    )
    generation = config.generation
    assert (generation.start_id, generation.eos_ids, generation.pad_id) == (
        theirs.bos_token_id,
        (theirs.eos_token_id,),
        theirs.pad_token_id,
    )


def test_every_field_is_a_factor(tmp_path: Path) -> None:
    vision: dict[str, Any] = GIT_LARGE["vision_config"]
    changes: list[dict[str, Any]] = [
        {},
        {"num_hidden_layers": 5},
        {"hidden_act": "relu"},
        {"tie_word_embeddings": True},
        {"max_position_embeddings": 512},
        {"vision_config": {**vision, "patch_size": 16}},
        {"vision_config": {**vision, "hidden_act": "gelu"}},
    ]
    every = [read(tmp_path, change).dimensions() for change in changes]
    assert all(one != another for index, one in enumerate(every) for another in every[:index])


def test_nulls_and_an_empty_list_name_nothing(tmp_path: Path) -> None:
    nothing = {"architectures": [], "position_embedding_type": None, "num_image_with_embedding": None}
    assert read(tmp_path, nothing) == read(tmp_path, {})


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "another class": ({"architectures": ["GitModel"]}, "architectures = ['GitModel']"),
    "a video": ({"num_image_with_embedding": 6}, "num_image_with_embedding = 6"),
    "a video of old": ({"num_image_with_temporal_embedding": 6}, "num_image_with_temporal_embedding = 6"),
    "no vision": ({"vision_config": None}, "vision_config = None"),
    "vision heads": ({"vision_config": {"num_attention_heads": 7}}, "vision_config.num_attention_heads = 7"),
    "heads": ({"num_attention_heads": 7}, "num_attention_heads = 7"),
    "activation": ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
    "positions": ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
    "a start beyond the vocabulary": ({"bos_token_id": 30522}, "bos_token_id = 30522"),
    "an end that is none": ({"eos_token_id": "end"}, "eos_token_id = 'end'"),
    "tie": ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_line_with_the_field_and_its_value(tmp_path: Path, name: str) -> None:
    changes, says = REFUSALS[name]
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, changes)
    assert str(refusal.value).startswith(f"unsupported {says}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("lengths", [{}, {"max_length": 9}, {"max_new_tokens": 5}])
def test_a_caption_is_as_long_as_transformers_makes_it(tmp_path: Path, lengths: dict[str, int]) -> None:
    model = random_captioners.git()
    for field, value in ({"max_length": None} | lengths).items():
        setattr(model.generation_config, field, value)
    model.save_pretrained(tmp_path)
    model.generation_config.eos_token_id = None  # no token ends it
    length = model.generate(pixel_values=torch.randn(1, 3, 96, 96)).shape[1]
    assert ModelConfig.from_folder(tmp_path).generation.max_length == length


def test_the_prefix_has_the_tensors_of_the_decoders_layers(tmp_path: Path) -> None:
    model = random_captioners.git(text={"num_hidden_layers": 3})
    model.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    weights = load_weights(tmp_path, config, NORMALISATION, torch.device("cpu"), torch.float32)
    prefix, decoder = weights.sets["prefix_block"], weights.sets["decoder_block"]
    assert len(prefix) == 2
    assert all(
        one is other
        for ours, theirs in zip(prefix, decoder, strict=False)
        for one, other in zip(ours, theirs, strict=True)
    )
    assert [one is other for one, other in zip(weights.sets["prefix_after"][0], decoder[2], strict=False)] == [
        True
    ] * 2
    added = 4 * (48 + 7)  # zeros for the patches' bias, and what the image is normalised with
    assert weight_bytes(weights) == sum(4 * parameter.numel() for parameter in model.parameters()) + added
