"""LLaVA's configurations: towers, layers that are run, tokens, names of both layouts, refusals by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import random_captioners
from support.checkpoints.chat_files import (
    LLAVA_PREFIX,
    LLAVA_START,
    LLAVA_TEMPLATE,
    TEXT_TEMPLATE,
    write_chat_files,
)
from support.parity.parity import NORMALISATION, weight_bytes

from snapcap.models.config import ConfigError, ModelConfig
from snapcap.models.dimensions import ClipConfig, LlavaConfig, SiglipConfig
from snapcap.models.text import RopeConfig
from snapcap.models.weights.load import load_weights

# As `llava-hf/llava-1.5-7b-hf` and `fancyfeast/llama-joycaption-beta-one-hf-llava` have them, of those fields that
# matter, but for the placeholder's id, which is that of the tests' tokenizer.
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 4,
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
JOYCAPTION: dict[str, Any] = {
    **LLAVA,
    "image_seq_length": 729,
    "text_config": {
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "vision_feature_select_strategy": "full",
}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return ModelConfig.from_folder(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chat_files(tmp_path, LLAVA_TEMPLATE)
    return tmp_path


def test_llava_as_on_the_hub(folder: Path) -> None:
    config = read(folder, LLAVA)
    assert isinstance(config.vision, ClipConfig)
    assert isinstance(config.decoder, LlavaConfig)
    vision, decoder, generation = config.vision, config.decoder, config.generation
    assert (vision.output_shape, vision.num_layers, vision.image_tokens) == ((577, 1024), 23, 576)
    assert (vision.activation, vision.layer_norm_eps) == ("quick_gelu", 1e-5)
    assert (decoder.hidden_size, decoder.num_layers, decoder.num_heads, decoder.kv_heads) == (4096, 32, 32, 32)
    assert (decoder.projector_activation, decoder.projector_bias, decoder.tied_head) == ("gelu", True, False)
    assert (config.prefix, config.prefix_length) == (LLAVA_PREFIX, 576 + len(LLAVA_PREFIX))
    assert (generation.start_id, generation.eos_ids, generation.max_length) == (LLAVA_START, (2,), 257)


def test_joycaption_as_on_the_hub(folder: Path) -> None:
    write_chat_files(folder, TEXT_TEMPLATE)
    config = read(folder, JOYCAPTION)
    assert isinstance(config.vision, SiglipConfig)
    assert isinstance(config.decoder, LlavaConfig)
    vision, decoder = config.vision, config.decoder
    assert (vision.output_shape, vision.num_layers, vision.image_tokens) == ((729, 1152), 26, 729)
    assert (decoder.kv_heads, decoder.head_dim, decoder.n_positions) == (8, 128, 131072 - 729 - 8)
    assert decoder.rope == RopeConfig(theta=500000.0, scaling=(8.0, 1.0, 4.0, 8192.0))
    assert config.generation.eos_ids == (128001, 128008, 128009)


def test_what_a_file_leaves_out_is_as_in_transformers(folder: Path) -> None:
    theirs = transformers.LlavaConfig()
    bare = {"model_type": "llava", "text_config": {"vocab_size": 32064}, "image_token_id": 4}
    config = read(folder, bare)
    for ours, other in ((config.vision, theirs.vision_config), (config.decoder, theirs.text_config)):
        assert (ours.hidden_size, ours.num_heads) == (other.hidden_size, other.num_attention_heads)
        assert ours.activation == other.hidden_act
    assert config.vision.num_layers == theirs.vision_config.num_hidden_layers + 1 + theirs.vision_feature_layer
    assert config.vision.patch_size[0] == theirs.vision_config.patch_size
    assert config.vision.layer_norm_eps == theirs.vision_config.layer_norm_eps
    assert config.decoder.layer_norm_eps == theirs.text_config.rms_norm_eps
    assert isinstance(config.decoder, LlavaConfig)
    assert config.decoder.projector_activation == theirs.projector_hidden_act
    with pytest.raises(ConfigError, match="no added token 32000, which stands for an image"):
        read(folder, {**bare, "image_token_id": None})


def test_what_a_tower_leaves_out_is_as_in_transformers(folder: Path) -> None:
    """A tower of CLIP ViT-B/32, all of whose fields are transformers' defaults."""
    bare = {"model_type": "llava", "text_config": {"vocab_size": 32064}, "image_token_id": 4}
    vision = read(folder, bare, vision_config={"model_type": "clip_vision_model"}).vision
    theirs = transformers.LlavaConfig.from_pretrained(folder).vision_config
    assert (vision.image_size[0], vision.patch_size[0]) == (theirs.image_size, theirs.patch_size)
    assert (vision.hidden_size, vision.num_heads) == (theirs.hidden_size, theirs.num_attention_heads)
    assert (vision.intermediate_size, vision.activation) == (theirs.intermediate_size, theirs.hidden_act)
    assert (vision.num_layers, vision.layer_norm_eps) == (theirs.num_hidden_layers - 1, theirs.layer_norm_eps)


@pytest.mark.parametrize(("layer", "used"), [(-1, 24), (-2, 23), (-24, 1), (1, 1), (24, 24)])
def test_no_layer_runs_that_the_decoder_does_not_see(folder: Path, layer: int, used: int) -> None:
    assert read(folder, LLAVA, vision_feature_layer=layer).vision.num_layers == used


REFUSED: dict[str, dict[str, Any]] = {
    "architectures": {"architectures": ["LlavaNextForConditionalGeneration"]},
    "text_config": {"text_config": None},
    "text_config.model_type": {"text_config": {"model_type": "mistral"}},
    "vision_config.model_type": {"vision_config": {"model_type": "pixtral"}},
    "vision_config.image_size": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 16}},
    "vision_feature_layer": {"vision_feature_layer": [-2, -5]},
    "vision_feature_select_strategy": {"vision_feature_select_strategy": "cls_patch"},
    "projector_hidden_act": {"projector_hidden_act": "tanh"},
    "image_token_index": {"image_token_index": 32064},
    "max_position_embeddings": {"text_config": {**LLAVA["text_config"], "max_position_embeddings": 500}},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_is_named(folder: Path, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(folder, LLAVA, **REFUSED[field])
    assert refused.value.field == field


@pytest.mark.parametrize("layer", [0, 25, -25])
def test_a_layer_that_is_not_there_is_refused(folder: Path, layer: int) -> None:
    with pytest.raises(ConfigError, match="vision_feature_layer"):
        read(folder, LLAVA, vision_feature_layer=layer)


def test_every_field_is_a_factor(folder: Path) -> None:
    every = [
        read(folder, LLAVA, **changes).dimensions()
        for changes in (
            {},
            {"vision_feature_layer": -3},
            {"vision_feature_select_strategy": "full"},
            {"projector_hidden_act": "relu"},
            {"vision_config": {**LLAVA["vision_config"], "model_type": "siglip_vision_model"}},
        )
    ]
    assert all(one != another for index, one in enumerate(every) for another in every[:index])


@pytest.mark.parametrize("tower", ["CLIP", "Siglip"])
def test_both_layouts_give_the_same_weights(tmp_path: Path, tower: Any) -> None:
    """As transformers 5 writes a tower and a text model, as 4 did, and as their modules are called."""
    model = random_captioners.llava(tower)
    model.save_pretrained(tmp_path)
    write_chat_files(tmp_path, LLAVA_TEMPLATE)
    config = ModelConfig.from_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    written = load_file(file)
    older = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor.clone()
        for name, tensor in written.items()
    }
    older["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(37)[None]
    modules = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, *others = (load(tmp_path, file, tensors, config) for tensors in (written, older, modules))
    for other in others:
        assert first.sets.keys() == other.sets.keys()
        for region, layers in first.sets.items():
            for mine, theirs in zip(layers, other.sets[region], strict=True):
                assert all(torch.equal(one, another) for one, another in zip(mine, theirs, strict=True))
    unused = sum(
        parameter.nbytes
        for name, parameter in model.model.vision_tower.named_parameters()
        if ".layers.2." in name or "post_layernorm" in name or name.startswith("head.")
    )
    assert unused > 0
    total = sum(parameter.nbytes for parameter in model.parameters())
    own = len(LLAVA_PREFIX) * config.decoder.hidden_size + config.decoder.head_dim // 2 + 7
    own += 48 if tower == "CLIP" else 0  # a bias of patches, which is zero
    assert weight_bytes(first) == total - unused + 4 * own


def load(folder: Path, file: Path, tensors: dict[str, torch.Tensor], config: ModelConfig) -> Any:
    save_file(tensors, file)
    return load_weights(folder, config, NORMALISATION, torch.device("cpu"), torch.float32)
