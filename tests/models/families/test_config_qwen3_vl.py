"""Qwen3-VL's configurations: shapes, tokens and lengths as on the hub, defaults, refusals by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.checkpoints.qwen3_vl_files import END, IMAGE, VISION_END, VISION_START, qwen3_vl, write_files, written

from snapcap.models.config import ConfigError, ModelConfig
from snapcap.models.dimensions import Qwen3VisionConfig, Qwen3VlConfig
from snapcap.models.regions.table import build_regions, layer_order
from snapcap.models.text import RopeConfig
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.plan import make_plan

# As `Qwen/Qwen3-VL-2B-Instruct` has it, of those fields that matter.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
GENERATION = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "top_p": 0.8,
    "top_k": 20,
    "temperature": 0.7,
    "repetition_penalty": 1.0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The image processor's file has the smallest and greatest area of the published ones."""
    write_files(tmp_path)
    size = {"longest_edge": 16777216, "shortest_edge": 65536}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessorFast", "size": size})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    return tmp_path


def read(folder: Path, image_tokens: int = 256, **changes: Any) -> ModelConfig:
    """``changes``: of the fields of a part, or of the whole."""
    config = {**QWEN, "image_token_id": IMAGE, **changes}
    for part in ("text_config", "vision_config"):
        config[part] = {**QWEN[part], **changes.get(part, {})}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_folder(folder, image_tokens=image_tokens)


def test_qwen3_vl_2b_as_on_the_hub(folder: Path) -> None:
    config = read(folder)
    vision, decoder, generation = config.vision, config.decoder, config.generation
    assert isinstance(vision, Qwen3VisionConfig)
    assert isinstance(decoder, Qwen3VlConfig)
    assert (vision.image_size, vision.output_shape, vision.image_tokens) == ((257, 1024), (1024, 1024), 256)
    assert (vision.num_layers, vision.num_heads, vision.taps, vision.position_side) == (24, 16, (6, 12, 18), 48)
    assert vision.token_buckets == (64, 128, 256)
    assert (decoder.num_heads, decoder.kv_heads, decoder.head_dim, decoder.num_layers) == (16, 8, 128, 28)
    assert (decoder.rope, decoder.sections) == (RopeConfig(theta=5e6), (24, 20, 20))
    assert (decoder.tied_head, decoder.activation, decoder.layer_norm_eps) == (True, "silu", 1e-6)
    assert (config.prefix, config.prefix_length, config.encoded_length) == ((VISION_START,), 257, 257 + 35)
    assert (generation.start_id, generation.image_id) == (VISION_END, IMAGE)
    assert (generation.eos_ids, generation.pad_id, generation.max_length) == ((151645, 151643), 151643, 257)
    assert generation.not_done == ("do_sample = true", "temperature = 0.7", "top_k = 20", "top_p = 0.8")
    assert make_plan(config, StartOptions()).cache_length == 257 + 64, "an instruction has room beside an answer"


def test_an_encode_runs_the_regions_of_one_number_of_tokens(folder: Path) -> None:
    """DeepStack's layers run between those of the blocks."""
    regions = build_regions(read(folder))
    names = [region.name for region in regions.encoder]
    first = [name.removesuffix("_t64") for name in names[:7]]
    assert first == [
        *("encoder_before", "encoder_block", "encoder_tap"),
        *("prefix_before", "prefix_block", "prefix_tap", "prefix_after"),
    ]
    assert names == [f"{name}_t{tokens}" for tokens in (64, 128, 256) for name in first]
    assert [region.tokens for region in regions.encoder] == [64] * 7 + [128] * 7 + [256] * 7
    assert regions["prefix_block_t128"].hidden == (1 + 128 + 35, 2048)
    order = [(first[place], layer) for place, layer in layer_order(regions.encoder[:7])]
    assert len(order) == sum(region.layers for region in regions.encoder[:7])
    assert order[6:9] == [("encoder_block", 5), ("encoder_tap", 0), ("encoder_block", 6)]
    assert order[-31:-25] == [
        *(("prefix_block", 0), ("prefix_tap", 0), ("prefix_block", 1)),
        *(("prefix_tap", 1), ("prefix_block", 2), ("prefix_tap", 2)),
    ]
    assert order[-1] == ("prefix_after", 0)


@pytest.mark.parametrize(
    ("image_tokens", "buckets"),
    [(200, (64, 128, 200)), (512, (64, 128, 256, 512)), (1024, (64, 128, 256, 512, 1024))],
)
def test_the_most_tokens_of_a_picture_are_an_option(
    folder: Path, image_tokens: int, buckets: tuple[int, ...]
) -> None:
    assert read(folder, image_tokens).vision.token_buckets == buckets


def test_what_a_file_leaves_out_is_as_in_transformers(folder: Path) -> None:
    theirs = transformers.Qwen3VLConfig()
    (folder / "generation_config.json").unlink()
    vision = {"out_hidden_size": theirs.text_config.hidden_size}  # transformers' own sizes do not fit together
    fields = {"model_type": "qwen3_vl", "vision_config": vision, "text_config": {}, "image_token_id": IMAGE}
    (folder / "config.json").write_text(json.dumps(fields))
    config = ModelConfig.from_folder(folder)
    assert isinstance(config.vision, Qwen3VisionConfig)
    for ours, other in ((config.vision, theirs.vision_config), (config.decoder, theirs.text_config)):
        assert (ours.hidden_size, ours.num_layers) == (other.hidden_size, other.num_hidden_layers)
        assert (ours.num_heads, ours.activation) == (other.num_attention_heads, other.hidden_act)
    assert config.vision.taps == tuple(index + 1 for index in theirs.vision_config.deepstack_visual_indexes)
    assert config.vision.position_side**2 == theirs.vision_config.num_position_embeddings
    assert isinstance(config.decoder, Qwen3VlConfig)
    assert config.decoder.kv_heads == theirs.text_config.num_key_value_heads
    assert config.decoder.rope.theta == theirs.text_config.rope_parameters["rope_theta"]
    assert config.decoder.inner_size == theirs.text_config.intermediate_size
    assert config.decoder.vocab_size == theirs.text_config.vocab_size


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(written(qwen3_vl(), tmp_path))
    assert isinstance(config.decoder, Qwen3VlConfig)
    assert (config.decoder.rope.theta, config.decoder.sections) == (5000.0, (4, 2, 2))
    assert (config.vision.taps, config.generation.eos_ids) == ((1, 3), (END,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "architectures"),
        ({"vision_config": {"patch_size": 14}}, r"vision_config\.patch_size = 14"),
        ({"vision_config": {"spatial_merge_size": 4}}, r"vision_config\.spatial_merge_size = 4"),
        ({"vision_config": {"temporal_patch_size": 1}}, r"vision_config\.temporal_patch_size = 1"),
        ({"vision_config": {"num_position_embeddings": 2300}}, r"vision_config\.num_position_embeddings = 2300"),
        ({"vision_config": {"num_heads": 3}}, r"vision_config\.num_heads = 3"),
        ({"vision_config": {"num_heads": 512}}, r"vision_config\.num_heads = 512"),
        ({"vision_config": {"out_hidden_size": 3}}, r"vision_config\.out_hidden_size = 3"),
        ({"vision_config": {"deepstack_visual_indexes": [5, 4]}}, r"deepstack_visual_indexes = \[5, 4\]"),
        ({"vision_config": {"deepstack_visual_indexes": [24]}}, r"deepstack_visual_indexes\[0\] = 24"),
        ({"vision_config": {"deepstack_visual_indexes": 5}}, r"deepstack_visual_indexes = 5"),
        ({"vision_config": {"deepstack_visual_indexes": ["x"]}}, r"deepstack_visual_indexes\[0\] = 'x'"),
        ({"vision_config": {"rope_parameters": {"rope_theta": 7}}}, r"vision_config\.rope_parameters"),
        ({"text_config": {"num_hidden_layers": 3}}, r"text_config\.num_hidden_layers = 3"),
        ({"text_config": {"model_type": "qwen3"}}, r"text_config\.model_type = 'qwen3'"),
        ({"text_config": {"attention_bias": True}}, r"text_config\.attention_bias = True"),
        ({"text_config": {"rope_scaling": {"mrope_section": [24, 20]}}}, "mrope_section"),
        ({"text_config": {"rope_scaling": {"mrope_section": [24, 20, 21]}}}, "mrope_section"),
        ({"text_config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}, "rope_parameters"),
        ({"image_token_id": 151936}, "image_token_id"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(folder, **changes)
