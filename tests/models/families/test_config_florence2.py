"""Florence-2's configurations in both layouts, what they default and what is refused; both layouts' weights."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import random_captioners
from support.parity.parity import NORMALISATION

from snapcap.models.config import ConfigError, ModelConfig
from snapcap.models.dimensions import DavitConfig, Florence2Config
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.table import build_regions
from snapcap.models.weights.load import load_weights

# The older layout, of microsoft/Florence-2-base.
OLDER: dict[str, Any] = {
    "architectures": ["Florence2ForConditionalGeneration"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "model_type": "florence2",
    "pad_token_id": 1,
    "projection_dim": 768,
    "text_config": {
        "model_type": "florence2_language",
        "vocab_size": 51289,
        "activation_function": "gelu",
        "add_final_layer_norm": False,
        "d_model": 768,
        "decoder_attention_heads": 12,
        "decoder_ffn_dim": 3072,
        "decoder_layers": 6,
        "decoder_start_token_id": 2,
        "early_stopping": True,
        "encoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "encoder_layers": 6,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "max_position_embeddings": 1024,
        "no_repeat_ngram_size": 3,
        "normalize_before": False,
        "num_beams": 3,
        "scale_embedding": False,
    },
    "vision_config": {
        "model_type": "davit",
        "patch_size": [7, 3, 3, 3],
        "patch_stride": [4, 2, 2, 2],
        "patch_padding": [3, 1, 1, 1],
        "patch_prenorm": [False, True, True, True],
        "dim_embed": [128, 256, 512, 1024],
        "num_heads": [4, 8, 16, 32],
        "num_groups": [4, 8, 16, 32],
        "depths": [1, 1, 9, 1],
        "window_size": 12,
        "projection_dim": 768,
        "visual_temporal_embedding": {"type": "COSINE", "max_temporal_embeddings": 100},
        "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": 50},
        "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
    },
}


def read(folder: Path, vision: dict[str, Any] | None = None, **text: Any) -> ModelConfig:
    """The older configuration with some fields of its parts changed."""
    parts = {
        "vision_config": {**OLDER["vision_config"], **(vision or {})},
        "text_config": {**OLDER["text_config"], **text},
    }
    (folder / "config.json").write_text(json.dumps(OLDER | parts))
    return ModelConfig.from_folder(folder)


def test_the_older_layout(tmp_path: Path) -> None:
    config = read(tmp_path)
    vision, text, generation = config.vision, config.decoder, config.generation
    assert isinstance(vision, DavitConfig)
    assert isinstance(text, Florence2Config)
    assert [stage.grid for stage in vision.stages] == [(192, 192), (96, 96), (48, 48), (24, 24)]
    assert (vision.image_size, vision.sequence_length, config.prefix_length) == ((768, 768), 577, 592)
    stages = ((192 * 192, 128, 1), (96 * 96, 256, 1), (48 * 48, 512, 9), (24 * 24, 1024, 1))
    products = [layers * tokens * width * (4 + 2 * 4) * width for tokens, width, layers in stages]
    assert vision.multiplications == 2 * sum(products), "for windows and for channels"
    assert (text.hidden_size, text.encoder_layers, text.num_layers, text.tied_head) == (768, 6, 6, True)
    assert (generation.start_id, generation.eos_ids, generation.pad_id, generation.max_length) == (2, (2,), 1, 129)
    assert (generation.forced_bos_id, generation.forced_eos_id) == (0, 2)
    assert (generation.num_beams, generation.no_repeat_ngram_size, generation.early_stopping) == (3, 3, True)
    names = [task.name for task in config.tasks]
    assert names[:3] == ["caption", "detailed_caption", "more_detailed_caption"]
    assert (len(names), names[-1]) == (16, "free_text")
    wider = config.with_text_tokens(79)
    assert (wider.prefix_length, wider.dimensions()["decoder"]["text_tokens"]) == (577 + 79, 79)
    assert config.with_text_tokens(0) is config
    for tokens in (14, 1024 - 577 + 1):
        with pytest.raises(
            ConfigError, match=rf"text_tokens = {tokens}: this model has positions for 15 to 447 tok"
        ):
            config.with_text_tokens(tokens)
    encoder = build_regions(config).encoder
    assert [(region.name, region.layers) for region in encoder] == [
        ("encoder_before", 1),
        ("encoder_block", 1),
        ("encoder_before_2", 1),
        ("encoder_block_2", 1),
        ("encoder_before_3", 1),
        ("encoder_block_3", 9),
        ("encoder_before_4", 1),
        ("encoder_block_4", 1),
        ("prefix_before", 1),
        ("prefix_block", 6),
        ("encoder_after", 1),
    ]


@pytest.mark.parametrize("name", ["", "florence2_vision", "florence_vision"])
def test_the_encoder_has_each_of_the_names_that_files_give_it(tmp_path: Path, name: str) -> None:
    """The first checkpoints' own code does not read the name, which is empty in files on the hub; it writes its
    configuration's own name into the files of models that were trained further."""
    assert read(tmp_path, {"model_type": name}).dimensions() == read(tmp_path).dimensions()


def test_a_generation_file_is_all_that_counts_of_beams_and_what_is_forced(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 2, "max_length": 40}))
    generation = read(tmp_path).generation
    assert (generation.num_beams, generation.no_repeat_ngram_size, generation.forced_bos_id) == (2, 0, None)
    assert (generation.max_length, generation.start_id) == (40, 2)


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another language model": ({}, {"model_type": "t5"}, "text_config.model_type = 't5'"),
    "another tower": ({"model_type": "swin"}, {}, "vision_config.model_type = 'swin'"),
    "heads": ({"num_heads": [4, 8, 16, 31]}, {}, "vision_config.num_heads = [4, 8, 16, 31]"),
    "stages": ({"depths": [1, 1]}, {}, "vision_config.depths = [1, 1]"),
    "norms": ({"patch_prenorm": [0, 1, 1, 1]}, {}, "vision_config.patch_prenorm = [0, 1, 1, 1]"),
    "width": ({"projection_dim": 512}, {}, "vision_config.projection_dim = 512"),
    "features": (
        {"image_feature_source": ["last_frame"]},
        {},
        "vision_config.image_feature_source = ['last_frame']",
    ),
    "positions": ({}, {"max_position_embeddings": 512}, "text_config.max_position_embeddings = 512"),
    "norms before": ({}, {"normalize_before": True}, "text_config.normalize_before = True"),
    "beams": ({}, {"num_beams": 0}, "num_beams = 0"),
    "what is forced": ({}, {"forced_bos_token_id": 99999}, "forced_bos_token_id = 99999"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_line_with_the_field_and_its_value(tmp_path: Path, name: str) -> None:
    vision, text, says = REFUSALS[name]
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, vision, **text)
    assert str(refusal.value).startswith(f"unsupported {says}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    ("processor", "size", "tokens"),
    [
        ({"size": {"height": 64, "width": 64}, "do_center_crop": False}, (64, 64), 5),
        ({"size": {"shortest_edge": 96}, "crop_size": {"height": 64, "width": 96}}, (64, 96), 7),
        ({"size": {"height": 512, "width": 768}, "do_center_crop": False}, (512, 768), 385),
        ({"size": [96, 96], "do_center_crop": False, "do_resize": False}, (768, 768), 577),
    ],
)
def test_the_image_size_is_the_processors(
    tmp_path: Path, file: str, processor: dict[str, Any], size: tuple[int, int], tokens: int
) -> None:
    """As in transformers, whose configuration of the encoder has no size: positions are for up to 24 rows here."""
    written = {"image_processor_type": "CLIPImageProcessor", **processor}
    nested = {"image_processor": written} if file == "processor_config.json" else written
    (tmp_path / file).write_text(json.dumps(nested))
    config = read(tmp_path, {"image_pos_embed": {"max_pos_embeddings": 24}})
    assert (config.vision.image_size, config.vision.image_tokens) == (size, tokens)
    if processor.get("do_resize", True):
        assert ImageTransform.from_folder(tmp_path, size, family="florence2").size == size


def test_a_small_image_has_a_small_table_of_positions(tmp_path: Path) -> None:
    nested = {"image_processor_type": "CLIPImageProcessor", "size": {"height": 64, "width": 64}}
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {**nested, "do_center_crop": False}})
    )
    config = read(tmp_path, {"image_pos_embed": {"max_pos_embeddings": 2}, "image_size": 768})
    assert config.vision.image_size == (64, 64)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match="max_position_embeddings = 2: an image has 24×24 tokens"):
        read(tmp_path, {"image_pos_embed": {"max_pos_embeddings": 2}})


def older_name(name: str) -> str:
    """What the remote code of the first checkpoints called a tensor, as transformers' conversion script has it."""
    name = name.removeprefix("model.")
    for theirs, older in (
        (r"convs\.(\d+)\.conv\.", r"convs.\1.proj."),
        (r"\.(conv[12])\.", r".\1.fn.dw."),
        (r"(spatial_block)\.norm1\.", r"\1.window_attn.norm."),
        (r"(channel_block)\.norm1\.", r"\1.channel_attn.norm."),
        (r"_block\.norm2\.", r"_block.ffn.norm."),
        (r"_attn\.(qkv|proj)\.", r"_attn.fn.\1."),
        (r"ffn\.(fc[12])\.", r"ffn.fn.net.\1."),
        (r"multi_modal_projector\.image_projection\.weight", "image_projection"),
        (r"multi_modal_projector\.image_position_embed", "image_pos_embed"),
        (r"multi_modal_projector\.", ""),
        (r"^language_model\.", "language_model.model."),
        (r"^lm_head", "language_model.lm_head"),
    ):
        name = re.sub(theirs, older, name)
    return name


def test_both_layouts_have_equal_weights(tmp_path: Path) -> None:
    random_captioners.florence2().save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)

    def load() -> dict[str, Any]:
        return dict(load_weights(tmp_path, config, NORMALISATION, torch.device("cpu"), torch.float32).sets)

    wanted = load()
    file = tmp_path / "model.safetensors"
    older = {older_name(name): tensor for name, tensor in load_file(file).items()}
    older["image_projection"] = older["image_projection"].t().contiguous()
    token = older["language_model.model.shared.weight"]
    for copy in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        older[f"language_model.{copy}.weight"] = token.clone()
    older["language_model.final_logits_bias"] = torch.zeros(1, 97)
    assert "vision_tower.blocks.0.0.spatial_block.window_attn.fn.qkv.weight" in older
    save_file(older, file)
    found = load()
    assert wanted.keys() == found.keys()
    for region, layers in wanted.items():
        for ours, theirs in zip(found[region], layers, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), region
