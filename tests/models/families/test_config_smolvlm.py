"""SmolVLM's and Idefics3's configurations: shapes, tokens and lengths, refusals by name; shared weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import random_captioners
from support.checkpoints.chat_files import PREFIX, TEMPLATE, write_chat_files
from support.parity.parity import NORMALISATION, weight_bytes

from snapcap.models.config import ConfigError, ModelConfig
from snapcap.models.dimensions import LlamaConfig, SiglipConfig
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.table import build_regions
from snapcap.models.text import RopeConfig
from snapcap.models.weights.load import load_weights
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.plan import make_plan
from snapcap.warmup.weights.find import layout_digest

# As `HuggingFaceTB/SmolVLM-256M-Instruct` has it, of those fields that matter.
SMOLVLM: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "image_token_id": 49190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "vocab_size": 49280,
    },
    "vision_config": {
        "model_type": "idefics3",
        "hidden_size": 768,
        "image_size": 512,
        "patch_size": 16,
        "num_attention_heads": 12,
        "size": {"longest_edge": 2048},
    },
}
GENERATION = {"bos_token_id": 1, "eos_token_id": [49279, 2], "pad_token_id": 2}


def read(folder: Path, changes: dict[str, Any] | None = None, **text: Any) -> ModelConfig:
    """``text``: changes of the text's part."""
    config = {**SMOLVLM, **(changes or {})}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": {**config["text_config"], **text}}))
    return ModelConfig.from_folder(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chat_files(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    return tmp_path


def test_smolvlm_256m_as_on_the_hub(folder: Path) -> None:
    config = read(folder)
    assert isinstance(config.vision, SiglipConfig)
    assert isinstance(config.decoder, LlamaConfig)
    vision, decoder, generation = config.vision, config.decoder, config.generation
    assert (vision.output_shape, vision.num_layers, vision.image_tokens) == ((1024, 768), 12, 64)
    assert vision.multiplications == 12 * 1024 * (4 * 768 * 768 + 2 * 768 * 3072)
    assert (decoder.num_heads, decoder.kv_heads, decoder.head_dim, decoder.num_layers) == (9, 3, 64, 30)
    assert (decoder.rope, decoder.activation, decoder.layer_norm_eps) == (RopeConfig(theta=1e5), "silu", 1e-5)
    assert (config.prefix, config.prefix_length) == (PREFIX, 69)
    assert decoder.n_positions == 8192 - 69
    assert (generation.start_id, generation.eos_ids, generation.pad_id) == (PREFIX[-2], (49279, 2), 2)
    assert generation.max_length == 129, "transformers' 20 would cut a sentence"
    (folder / "generation_config.json").unlink()
    other = read(
        folder, {"pad_token_id": 128002}, pad_token_id=2
    )  # the first is transformers' default, and no token
    assert other.generation.pad_id == 2
    assert [(region.name, region.layers) for region in build_regions(config)][:8] == [
        ("encoder_before", 1),
        ("encoder_block", 12),
        ("prefix_before", 1),
        ("prefix_block", 29),
        ("prefix_after", 1),
        ("decoder_before", 1),
        ("decoder_block", 30),
        ("decoder_after", 1),
    ]
    plan = make_plan(config, StartOptions())
    assert plan.cache_length == 129 + 64, "an instruction has room beside the default length"


def test_what_a_file_leaves_out_is_as_in_transformers(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    fields = {"model_type": "smolvlm", "architectures": None, "vision_config": {}, "text_config": {}}
    image = {"image_size": 64}  # with transformers' own size an image of 7 patches a side is no squares of 2
    (folder / "config.json").write_text(json.dumps({**fields, "vision_config": image}))
    config, theirs = ModelConfig.from_folder(folder), transformers.SmolVLMConfig.from_pretrained(folder)
    for ours, other in ((config.vision, theirs.vision_config), (config.decoder, theirs.text_config)):
        assert (ours.hidden_size, ours.num_layers) == (other.hidden_size, other.num_hidden_layers)
        assert (ours.num_heads, ours.activation) == (other.num_attention_heads, other.hidden_act)
    assert config.vision.patch_size[0] == theirs.vision_config.patch_size
    assert config.vision.layer_norm_eps == theirs.vision_config.layer_norm_eps
    assert config.decoder.layer_norm_eps == theirs.text_config.rms_norm_eps
    assert isinstance(config.vision, SiglipConfig)
    assert config.vision.pixel_shuffle == theirs.scale_factor


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"rope_theta": 273768.0}, RopeConfig(theta=273768.0)),
        ({"rope_parameters": {"rope_theta": 5000, "rope_type": "default"}}, RopeConfig(theta=5000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(theta=1e5, scaling=(2.0,))),
        ({"rope_scaling": None}, RopeConfig(theta=1e5)),
    ],
    ids=str,
)
def test_rotary_positions_of_both_versions_of_transformers(
    folder: Path, given: dict[str, Any], wanted: RopeConfig
) -> None:
    decoder = read(folder, **given).decoder
    assert isinstance(decoder, LlamaConfig)
    assert decoder.rope == wanted


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "architectures": ({"architectures": ["Idefics3Model"]}, {}),
    "text_config.model_type": ({}, {"model_type": "mistral"}),
    "text_config.attention_bias": ({}, {"attention_bias": True}),
    "text_config.num_key_value_heads": ({}, {"num_key_value_heads": 2}),
    "text_config.head_dim": ({}, {"head_dim": 7}),
    "text_config.num_attention_heads": ({}, {"num_attention_heads": 10, "num_key_value_heads": 5}),
    "text_config.rope_scaling.rope_type": ({}, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    "text_config.rope_scaling.factor": ({}, {"rope_scaling": {"rope_type": "linear"}}),
    "vision_config.image_size": ({"scale_factor": 5}, {}),
    "max_position_embeddings": ({}, {"max_position_embeddings": 70}),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_is_named(folder: Path, field: str) -> None:
    changes, text = REFUSED[field]
    with pytest.raises(ConfigError) as refused:
        read(folder, changes, **text)
    assert refused.value.field == field


def test_every_field_is_a_factor(folder: Path) -> None:
    vision: dict[str, Any] = SMOLVLM["vision_config"]
    every = [
        read(folder, changes, **text).dimensions()
        for changes, text in (
            ({}, {}),
            ({"scale_factor": 2}, {}),
            ({"vision_config": {**vision, "patch_size": 32}}, {}),
            ({}, {"num_key_value_heads": 9}),
            ({}, {"head_dim": 32}),
            ({}, {"rope_theta": 10000}),
        )
    ]
    write_chat_files(folder, TEMPLATE.replace("|im_start|>", "|im_start|>Hi. "))
    every.append(read(folder).dimensions())
    assert all(one != another for index, one in enumerate(every) for another in every[:index])


def test_prepared_weights_are_of_one_template(folder: Path) -> None:
    """Its tokens' embeddings are among them; packages depend on their number alone."""
    first = read(folder)
    write_chat_files(folder, TEMPLATE.replace("{{':'}}", "{{','}}"))
    second, transform = read(folder), ImageTransform((512, 512))
    assert first.prefix != second.prefix
    assert first.dimensions() == second.dimensions()
    assert layout_digest(first, transform) != layout_digest(second, transform)


def test_the_prefix_and_the_steps_have_the_same_tensors(tmp_path: Path) -> None:
    """They are on the device once."""
    model = random_captioners.smolvlm()
    model.save_pretrained(tmp_path)
    write_chat_files(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    weights = load_weights(tmp_path, config, NORMALISATION, torch.device("cpu"), torch.float32)
    for layer, shared in enumerate(weights.sets["prefix_block"]):
        assert all(one is other for one, other in zip(shared, weights.sets["decoder_block"][layer], strict=True))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    own = len(PREFIX) * config.decoder.hidden_size + config.decoder.head_dim // 2 + 7
    assert weight_bytes(weights) == 4 * (parameters + own), "but for the prefix, frequencies and statistics"
