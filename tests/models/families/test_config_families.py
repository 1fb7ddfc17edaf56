"""The configurations of BLIP, and of pairs other than ViT and GPT-2: shapes, special tokens, refusals by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import random_captioners

from snapcap.models.config import ConfigError, ModelConfig
from snapcap.models.dimensions import BeitConfig, BertConfig
from snapcap.models.regions.table import build_regions

# As on the hub, where files of transformers 4 hold every field that a configuration has; here those that matter.
BLIP_BASE: dict[str, Any] = {
    "architectures": ["BlipForConditionalGeneration"],
    "image_text_hidden_size": 256,
    "logit_scale_init_value": 2.6592,
    "model_type": "blip",
    "projection_dim": 512,
    "text_config": {
        "add_cross_attention": False,
        "bos_token_id": 30522,
        "decoder_start_token_id": None,
        "encoder_hidden_size": 768,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "is_decoder": True,
        "layer_norm_eps": 1e-12,
        "max_length": 20,
        "max_position_embeddings": 512,
        "model_type": "blip_text_model",
        "num_attention_heads": 12,
        "num_beams": 1,
        "num_hidden_layers": 12,
        "pad_token_id": 0,
        "sep_token_id": 102,
        "tie_word_embeddings": True,
        "vocab_size": 30524,
    },
    "vision_config": {
        "hidden_act": "gelu",
        "hidden_size": 768,
        "image_size": 384,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "model_type": "blip_vision_model",
        "num_attention_heads": 12,
        "num_channels": 3,
        "num_hidden_layers": 12,
        "patch_size": 16,
    },
}
LARGE_VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
VIT = {"model_type": "vit", "image_size": 96}
DECODES = {"is_decoder": True, "add_cross_attention": True}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """With fields put in, sections merged, and a field ``...`` left out."""
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        merged[name] = changed(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return {name: value for name, value in merged.items() if value is not ...}


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def pair(encoder: dict[str, Any], decoder: dict[str, Any], **top: Any) -> dict[str, Any]:
    specials = {"decoder_start_token_id": 3, "eos_token_id": 2}
    return {"model_type": "vision-encoder-decoder", "encoder": encoder, "decoder": decoder, **specials, **top}


def test_blip_base_as_on_the_hub(tmp_path: Path) -> None:
    config = read(tmp_path, BLIP_BASE, {"max_length": 50, "eos_token_id": 2, "bos_token_id": 30522})
    assert (config.vision.image_size, config.vision.sequence_length, config.vision.num_layers) == (
        (384, 384),
        577,
        12,
    )
    assert isinstance(config.decoder, BertConfig)
    assert (config.decoder.vocab_size, config.decoder.n_positions, config.decoder.head_dim) == (30524, 512, 64)
    generation = config.generation
    assert (generation.start_id, generation.eos_ids, generation.pad_id) == (30522, (102,), 0)
    assert generation.max_length == 21  # transformers generates 20 new tokens, whatever the files say
    assert not config.projected
    assert config.cross_size == 768


def test_blip_large_reads_a_wider_encoder_without_a_projection(tmp_path: Path) -> None:
    config = read(tmp_path, changed(BLIP_BASE, {"vision_config": LARGE_VISION}))
    assert (config.vision.hidden_size, config.vision.num_layers, config.vision.num_heads) == (1024, 24, 16)
    assert (config.cross_size, config.decoder.hidden_size, config.projected) == (1024, 768, False)
    regions = build_regions(config)
    assert [region.layers for region in regions] == [1, 24, 1, 1, 12, 1, 1, 1, 1]


def test_what_a_blip_file_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    theirs = transformers.BlipConfig()
    config = read(tmp_path, {"model_type": "blip", "text_config": {}, "vision_config": {}})
    vision, text = config.vision, config.decoder
    assert (vision.image_size[0], vision.patch_size[0]) == (
        theirs.vision_config.image_size,
        theirs.vision_config.patch_size,
    )
    for ours, other in ((vision, theirs.vision_config), (text, theirs.text_config)):
        assert (ours.hidden_size, ours.num_layers) == (other.hidden_size, other.num_hidden_layers)
        assert (ours.num_heads, ours.activation) == (other.num_attention_heads, other.hidden_act)
        assert ours.layer_norm_eps == other.layer_norm_eps
    assert (text.vocab_size, text.n_positions) == (
        theirs.text_config.vocab_size,
        theirs.text_config.max_position_embeddings,
    )
    assert config.generation.start_id == theirs.text_config.bos_token_id
    assert config.generation.eos_ids == (theirs.text_config.sep_token_id,)


def test_what_an_encoder_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    vision = read(tmp_path, pair({"model_type": "deit"}, {"model_type": "gpt2"})).vision
    deit = transformers.DeiTConfig()
    assert (vision.image_size[0], vision.hidden_size, vision.qkv_bias) == (224, deit.hidden_size, deit.qkv_bias)
    assert vision.sequence_length == 14 * 14 + 2
    vision = read(tmp_path, pair({"model_type": "beit"}, {"model_type": "gpt2"})).vision
    beit = transformers.BeitConfig()
    assert isinstance(vision, BeitConfig)
    assert (vision.positions, vision.final_norm) == (
        beit.use_absolute_position_embeddings,
        not beit.use_mean_pooling,
    )
    assert (vision.layer_bias, vision.shared_bias, vision.layer_scale) == (
        beit.use_relative_position_bias,
        beit.use_shared_relative_position_bias,
        beit.layer_scale_init_value > 0,
    )


@pytest.mark.parametrize("family", ["bert", "roberta", "trocr"])
def test_what_a_decoder_leaves_out_is_as_in_transformers(tmp_path: Path, family: str) -> None:
    decoder = read(tmp_path, pair(VIT, {"model_type": family, **DECODES})).decoder
    theirs = {
        "bert": transformers.BertConfig,
        "roberta": transformers.RobertaConfig,
        "trocr": transformers.TrOCRConfig,
    }[family]()
    assert isinstance(decoder, BertConfig)
    assert (decoder.vocab_size, decoder.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (decoder.num_layers, decoder.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    skipped = theirs.pad_token_id + 1 if family == "roberta" else 0
    assert decoder.n_positions == theirs.max_position_embeddings - skipped
    assert decoder.tied_head
    assert decoder.embedding_scale == 1.0


def test_learned_positions_of_trocr_need_no_padding_token(tmp_path: Path) -> None:
    """transformers counts only the sinusoidal positions from the padding token's."""
    decoder = {"model_type": "trocr", "d_model": 256, "decoder_attention_heads": 8, "pad_token_id": None}
    padded = read(tmp_path, pair(VIT, decoder | {"pad_token_id": 1}))
    assert read(tmp_path, pair(VIT, decoder)).decoder == padded.decoder
    with pytest.raises(ConfigError, match=r"decoder\.pad_token_id = None"):
        read(tmp_path, pair(VIT, decoder | {"use_learned_position_embeddings": False}))


def test_trocr_small_on_the_hub_scales_its_embedding(tmp_path: Path) -> None:
    decoder = {"model_type": "trocr", "d_model": 256, "decoder_attention_heads": 8, "scale_embedding": True}
    encoder = {"model_type": "deit", "hidden_size": 384, "num_attention_heads": 6, "image_size": 384}
    config = read(tmp_path, pair(encoder, decoder | {"cross_attention_hidden_size": 384}))
    assert isinstance(config.decoder, BertConfig)
    assert (config.decoder.embedding_scale, config.cross_size, config.projected) == (16.0, 384, False)
    assert read(tmp_path, pair(encoder, decoder)).projected


def test_every_dimension_is_a_factor_and_no_family_shares_a_key(tmp_path: Path) -> None:
    bert = {"model_type": "bert", **DECODES}
    base = read(tmp_path, BLIP_BASE).dimensions()
    assert (base["family"], base["vision"]["family"], base["decoder"]["family"]) == ("blip", "blip", "blip")
    others = [
        read(tmp_path, changed(BLIP_BASE, {"vision_config": LARGE_VISION})),
        read(tmp_path, changed(BLIP_BASE, {"text_config": {"num_attention_heads": 8}})),
        read(tmp_path, changed(BLIP_BASE, {"text_config": {"hidden_act": "relu"}})),
        read(tmp_path, pair({**VIT, "image_size": 384}, {**bert, "vocab_size": 30524})),
        read(tmp_path, pair({**VIT, "image_size": 384}, {**bert, "model_type": "roberta"})),
        read(tmp_path, pair({**VIT, "image_size": 384, "model_type": "deit"}, bert)),
    ]
    every = [base, *(other.dimensions() for other in others)]
    assert all(one != another for index, one in enumerate(every) for another in every[:index])


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "answers, not captions": (
        changed(BLIP_BASE, {"architectures": ["BlipForQuestionAnswering"]}),
        "architectures = ['BlipForQuestionAnswering']",
    ),
    "no text": (changed(BLIP_BASE, {"text_config": ...}), "text_config = None"),
    "no vision": (changed(BLIP_BASE, {"vision_config": []}), "vision_config = []"),
    "an encoder": (changed(BLIP_BASE, {"text_config": {"is_decoder": False}}), "text_config.is_decoder = False"),
    "blip heads": (
        changed(BLIP_BASE, {"text_config": {"num_attention_heads": 7}}),
        "text_config.num_attention_heads = 7",
    ),
    "blip activation": (
        changed(BLIP_BASE, {"vision_config": {"hidden_act": "mish"}}),
        "vision_config.hidden_act = 'mish'",
    ),
    "blip patches": (changed(BLIP_BASE, {"vision_config": {"patch_size": 0}}), "vision_config.patch_size = 0"),
    "blip channels": (changed(BLIP_BASE, {"vision_config": {"num_channels": 1}}), "vision_config.num_channels = 1"),
    "blip start": (
        changed(BLIP_BASE, {"text_config": {"bos_token_id": 30524}}),
        "text_config.bos_token_id = 30524",
    ),
    "blip padding": (
        changed(BLIP_BASE, {"text_config": {"pad_token_id": 30524}}),
        "text_config.pad_token_id = 30524",
    ),
    "blip end": (changed(BLIP_BASE, {"text_config": {"sep_token_id": None}}), "text_config.sep_token_id = None"),
    "blip with relative positions": (
        changed(BLIP_BASE, {"text_config": {"position_embedding_type": "relative_key"}}),
        "text_config.position_embedding_type = 'relative_key'",
    ),
    "blip tie": (changed(BLIP_BASE, {"tie_word_embeddings": "yes"}), "tie_word_embeddings = 'yes'"),
    "swin": (pair({"model_type": "swin"}, {"model_type": "gpt2"}), "encoder.model_type = 'swin'"),
    "beit that is not square": (
        pair({"model_type": "beit", "image_size": [96, 64]}, {"model_type": "gpt2"}),
        "encoder.image_size = (96, 64)",
    ),
    "beit scale": (
        pair({"model_type": "beit", "layer_scale_init_value": None}, {"model_type": "gpt2"}),
        "encoder.layer_scale_init_value = None",
    ),
    "a list for a family": (pair({"model_type": ["vit"]}, {"model_type": "gpt2"}), "encoder.model_type = ['vit']"),
    "bert that does not decode": (
        pair(VIT, {"model_type": "bert", "add_cross_attention": True}),
        "decoder.is_decoder = False",
    ),
    "bert that sees no image": (
        pair(VIT, {"model_type": "bert", "is_decoder": True}),
        "decoder.add_cross_attention = False",
    ),
    "bert with relative positions": (
        pair(VIT, {"model_type": "bert", **DECODES, "position_embedding_type": "relative_key"}),
        "decoder.position_embedding_type = 'relative_key'",
    ),
    "bert of another width": (
        pair({**VIT, "hidden_size": 384}, {"model_type": "bert", **DECODES, "cross_attention_hidden_size": 384}),
        "decoder.cross_attention_hidden_size = 384",
    ),
    "roberta without positions": (
        pair(VIT, {"model_type": "roberta", **DECODES, "max_position_embeddings": 2}),
        "decoder.max_position_embeddings = 2",
    ),
    "roberta that starts with padding": (
        pair(VIT, {"model_type": "roberta", **DECODES}, decoder_start_token_id=1),
        "decoder_start_token_id = 1",
    ),
    "roberta without padding": (
        pair(VIT, {"model_type": "roberta", **DECODES, "pad_token_id": None}),
        "decoder.pad_token_id = None",
    ),
    "trocr of another width": (
        pair(VIT, {"model_type": "trocr", "cross_attention_hidden_size": 384}),
        "decoder.cross_attention_hidden_size = 384",
    ),
    "trocr heads": (pair(VIT, {"model_type": "trocr", "d_model": 100}), "decoder.decoder_attention_heads = 16"),
    "trocr scale": (pair(VIT, {"model_type": "trocr", "scale_embedding": 2}), "decoder.scale_embedding = 2"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_line_with_the_field_and_its_value(tmp_path: Path, name: str) -> None:
    config, says = REFUSALS[name]
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, config)
    assert str(refusal.value).startswith(f"unsupported {says}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("lengths", [{}, {"max_length": 9}, {"max_new_tokens": 5}])
def test_a_caption_of_a_pair_is_as_long_as_transformers_makes_it(tmp_path: Path, lengths: dict[str, int]) -> None:
    encoder = transformers.ViTConfig(**random_captioners.VISION)
    specials = {"bos_token_id": 1, "eos_token_id": 2}
    decoder = transformers.GPT2Config(vocab_size=97, n_positions=64, n_embd=48, n_layer=1, n_head=3, **specials)
    model = random_captioners.pair(encoder, decoder)
    for field, value in ({"max_length": None} | lengths).items():
        setattr(model.generation_config, field, value)
    model.save_pretrained(tmp_path)
    model.generation_config.eos_token_id = None  # no token ends it
    length = model.generate(torch.randn(1, 3, 96, 96)).shape[1]
    assert ModelConfig.from_folder(tmp_path).generation.max_length == length


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_a_caption_of_blip_is_as_long_as_transformers_makes_it(tmp_path: Path) -> None:
    random_captioners.blip().save_pretrained(tmp_path)
    for name, section in (("config.json", "text_config"), ("generation_config.json", "")):
        content = json.loads((tmp_path / name).read_text())
        (content[section] if section else content)["max_length"] = 33
        (tmp_path / name).write_text(json.dumps(content))
    model = transformers.BlipForConditionalGeneration.from_pretrained(tmp_path).eval()
    model.config.text_config.sep_token_id = model.text_decoder.generation_config.eos_token_id = None
    length = model.generate(torch.randn(1, 3, 96, 96)).shape[1]
    assert ModelConfig.from_folder(tmp_path).generation.max_length == length == 21
