"""config.json and generation_config.json: what is read, and that every refusal names its field and value."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapcap.models.config import ModelConfig
from snapcap.models.fields import ACTIVATIONS, ConfigError

ENCODER = {"model_type": "vit", "hidden_size": 48, "num_attention_heads": 3, "image_size": 96, "patch_size": 16}
DECODER = {"model_type": "gpt2", "n_embd": 48, "n_head": 3, "vocab_size": 97, "n_positions": 64}
TOP = {"model_type": "vision-encoder-decoder", "decoder_start_token_id": 1, "eos_token_id": 2}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write(encoder={…}, decoder={…}, generation={…}, **top)`` -> a folder; a field ``...`` is left out."""

    def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in {**base, **changes}.items() if value is not ...}

    def make(
        encoder: dict[str, Any] | None = None,
        decoder: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
        **top: Any,
    ) -> Path:
        parts = {"encoder": merge(ENCODER, encoder or {}), "decoder": merge(DECODER, decoder or {})}
        (tmp_path / "config.json").write_text(json.dumps(merge({**TOP, **parts}, top)))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return make


def test_the_dimensions_are_those_of_the_file(write: Write) -> None:
    encoder = {"num_hidden_layers": 2, "intermediate_size": 96, "hidden_act": "relu", "qkv_bias": False}
    decoder = {"n_layer": 5, "n_inner": 80, "layer_norm_epsilon": 1e-6, "scale_attn_weights": False}
    config = ModelConfig.from_folder(write({**encoder, "layer_norm_eps": 1}, decoder))
    vision, text = config.vision, config.decoder
    assert (vision.image_size, vision.patch_size, vision.grid, vision.sequence_length) == (
        (96, 96),
        (16, 16),
        (6, 6),
        37,
    )
    assert (vision.hidden_size, vision.num_layers, vision.num_heads, vision.intermediate_size) == (48, 2, 3, 96)
    assert (vision.activation, vision.qkv_bias, vision.layer_norm_eps) == ("relu", False, 1.0)
    assert (text.vocab_size, text.n_positions, text.hidden_size, text.num_layers) == (97, 64, 48, 5)
    assert (text.inner_size, text.layer_norm_eps, text.scale_attention, text.head_dim) == (80, 1e-6, False, 16)
    assert not config.projected


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"torch_dtype": None}, ""),
        ({"dtype": ["bfloat16"]}, ""),
        ({}, ""),
    ],
)
def test_the_dtype_of_its_tensors_is_that_of_the_file(fields: dict[str, Any], stored: str, write: Write) -> None:
    folder = write({}, {})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | fields))
    config = ModelConfig.from_folder(folder)
    assert config.stored_dtype == stored
    assert config.dimensions() == ModelConfig.from_folder(write({}, {})).dimensions(), "packages are as for others"


def test_what_a_file_leaves_out_is_as_in_transformers(write: Write) -> None:
    import transformers

    nothing = [{name: ... for name in part if name != "model_type"} for part in (ENCODER, DECODER)]
    config = ModelConfig.from_folder(write(*nothing))
    vit, gpt2 = transformers.ViTConfig(), transformers.GPT2Config()
    assert config.vision.image_size == (vit.image_size, vit.image_size)
    assert config.vision.patch_size == (vit.patch_size, vit.patch_size)
    assert (config.vision.hidden_size, config.vision.num_layers) == (vit.hidden_size, vit.num_hidden_layers)
    assert (config.vision.num_heads, config.vision.intermediate_size) == (
        vit.num_attention_heads,
        vit.intermediate_size,
    )
    assert (config.vision.activation, config.vision.qkv_bias) == (vit.hidden_act, vit.qkv_bias)
    assert config.vision.layer_norm_eps == vit.layer_norm_eps
    assert (config.decoder.vocab_size, config.decoder.n_positions) == (gpt2.vocab_size, gpt2.n_positions)
    assert (config.decoder.hidden_size, config.decoder.num_layers) == (gpt2.n_embd, gpt2.n_layer)
    assert (config.decoder.num_heads, config.decoder.inner_size) == (gpt2.n_head, 4 * gpt2.n_embd)
    assert config.decoder.activation == gpt2.activation_function
    assert config.decoder.layer_norm_eps == gpt2.layer_norm_epsilon
    assert config.decoder.tied_head


def test_a_size_may_be_a_pair_of_height_and_width(write: Write) -> None:
    vision = ModelConfig.from_folder(write({"image_size": [100, 68], "patch_size": [16, 8]})).vision
    assert (vision.image_size, vision.grid, vision.sequence_length) == ((100, 68), (6, 8), 49)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_that_is_accepted_has_a_function_like_transformers(name: str) -> None:
    import torch
    from transformers.activations import ACT2FN

    from snapcap.models.layers.linear import activation

    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), rtol=1e-5, atol=1e-6)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "kosmos-2"}, "model_type = 'kosmos-2'"),
    "no model type": ({"model_type": ...}, "model_type = None"),
    "no encoder": ({"encoder": None}, "encoder = None"),
    "no decoder": ({"decoder": ...}, "decoder = None"),
    "another encoder": ({"encoder": {"model_type": "swin"}}, "encoder.model_type = 'swin'"),
    "another decoder": ({"decoder": {"model_type": "t5"}}, "decoder.model_type = 't5'"),
    "encoder activation": ({"encoder": {"hidden_act": "mish"}}, "encoder.hidden_act = 'mish'"),
    "decoder activation": ({"decoder": {"activation_function": ["a"]}}, "decoder.activation_function = ['a']"),
    "encoder width": ({"encoder": {"hidden_size": 0}}, "encoder.hidden_size = 0"),
    "encoder width as text": ({"encoder": {"hidden_size": "48"}}, "encoder.hidden_size = '48'"),
    "encoder layers": ({"encoder": {"num_hidden_layers": -1}}, "encoder.num_hidden_layers = -1"),
    "encoder layers true": ({"encoder": {"num_hidden_layers": True}}, "encoder.num_hidden_layers = True"),
    "encoder heads": ({"encoder": {"num_attention_heads": 5}}, "encoder.num_attention_heads = 5"),
    "encoder inner": ({"encoder": {"intermediate_size": 1.5}}, "encoder.intermediate_size = 1.5"),
    "encoder epsilon": ({"encoder": {"layer_norm_eps": None}}, "encoder.layer_norm_eps = None"),
    "encoder epsilon as text": ({"encoder": {"layer_norm_eps": "tiny"}}, "encoder.layer_norm_eps = 'tiny'"),
    "channels": ({"encoder": {"num_channels": 1}}, "encoder.num_channels = 1"),
    "image size": ({"encoder": {"image_size": [96, 96, 3]}}, "encoder.image_size = [96, 96, 3]"),
    "image size as a fraction": ({"encoder": {"image_size": 96.0}}, "encoder.image_size = 96.0"),
    "image size none": ({"encoder": {"image_size": None}}, "encoder.image_size = None"),
    "image size true": ({"encoder": {"image_size": True}}, "encoder.image_size = True"),
    "image size negative": ({"encoder": {"image_size": [96, -1]}}, "encoder.image_size = [96, -1]"),
    "patch size": ({"encoder": {"patch_size": 0}}, "encoder.patch_size = 0"),
    "patch above image": ({"encoder": {"patch_size": 128}}, "encoder.patch_size = (128, 128)"),
    "no cross-attention": ({"decoder": {"add_cross_attention": False}}, "decoder.add_cross_attention = False"),
    "scale by layer": (
        {"decoder": {"scale_attn_by_inverse_layer_idx": True}},
        "decoder.scale_attn_by_inverse_layer_idx = True",
    ),
    "cross width of the encoder": (
        {"encoder": {"hidden_size": 72}, "decoder": {"cross_attention_hidden_size": 72}},
        "decoder.cross_attention_hidden_size = 72",
    ),
    "cross width of the decoder": (
        {"encoder": {"hidden_size": 72}, "decoder": {"cross_attention_hidden_size": 48}},
        "decoder.cross_attention_hidden_size = 48",
    ),
    "decoder width": ({"decoder": {"n_embd": None}}, "decoder.n_embd = None"),
    "decoder heads": ({"decoder": {"n_head": 7}}, "decoder.n_head = 7"),
    "decoder layers": ({"decoder": {"n_layer": 0}}, "decoder.n_layer = 0"),
    "decoder inner": ({"decoder": {"n_inner": 0}}, "decoder.n_inner = 0"),
    "decoder positions": ({"decoder": {"n_positions": "many"}}, "decoder.n_positions = 'many'"),
    "vocabulary": ({"decoder": {"vocab_size": -5}}, "decoder.vocab_size = -5"),
    "decoder epsilon": ({"decoder": {"layer_norm_epsilon": 0}}, "decoder.layer_norm_epsilon = 0"),
    "start above the vocabulary": ({"decoder_start_token_id": 97}, "decoder_start_token_id = 97"),
    "start negative": ({"decoder_start_token_id": -1}, "decoder_start_token_id = -1"),
    "no start": ({"decoder_start_token_id": ...}, "decoder_start_token_id = None"),
    "start true": ({"decoder_start_token_id": True}, "decoder_start_token_id = True"),
    "end above the vocabulary": ({"eos_token_id": 50256}, "eos_token_id = 50256"),
    "padding above the vocabulary": ({"generation": {"pad_token_id": 97}}, "pad_token_id = 97"),
    "the start is another field's": (
        {"decoder_start_token_id": ..., "generation": {"bos_token_id": 98}},
        "bos_token_id = 98",
    ),
    "one of several ends": ({"eos_token_id": [2, "</s>"]}, "eos_token_id = '</s>'"),
    "max_length": ({"generation": {"max_length": "long"}}, "max_length = 'long'"),
    "max_length zero": ({"generation": {"max_length": 0}}, "max_length = 0"),
    "max_new_tokens": ({"generation": {"max_new_tokens": -3}}, "max_new_tokens = -3"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_line_with_the_field_and_its_value(write: Write, name: str) -> None:
    changes, says = REFUSALS[name]
    top = {part: value for part, value in changes.items() if not isinstance(value, dict)}
    parts = {part: value for part, value in changes.items() if isinstance(value, dict)}
    folder = write(**parts)
    if top:
        config = json.loads((folder / "config.json").read_text())
        config = {field: value for field, value in {**config, **top}.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_folder(folder)
    assert str(refusal.value).startswith(f"unsupported {says}: ")
    assert "\n" not in str(refusal.value)
    assert refusal.value.field == says.partition(" = ")[0]


def test_a_cross_attention_width_that_changes_nothing_is_accepted(write: Write) -> None:
    assert not ModelConfig.from_folder(write(decoder={"cross_attention_hidden_size": 48})).projected
    wider = write({"hidden_size": 72}, {"cross_attention_hidden_size": None})
    assert ModelConfig.from_folder(wider).projected


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b""])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: not valid JSON .*copy it again"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_folder_in_the_place_of_a_file_is_named(write: Write, name: str) -> None:
    folder = write()
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} cannot be read: "):
        ModelConfig.from_folder(folder)


def test_json_that_is_not_an_object_is_refused(write: Write) -> None:
    folder = write()
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"generation_config\.json.*object is expected"):
        ModelConfig.from_folder(folder)


def test_a_folder_without_a_configuration_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_generation_fields_come_from_its_own_file_then_the_top_then_the_decoder(write: Write) -> None:
    decoder = {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7, "max_length": 30}
    top = {"decoder_start_token_id": 3, "eos_token_id": 4, "pad_token_id": ..., "max_length": ...}
    from_config = ModelConfig.from_folder(write(decoder=decoder, **top)).generation
    assert (from_config.start_id, from_config.eos_ids, from_config.pad_id, from_config.max_length) == (
        3,
        (4,),
        7,
        30,
    )
    own = {"decoder_start_token_id": 10, "eos_token_id": [11, 12], "pad_token_id": 13, "max_length": 14}
    first = ModelConfig.from_folder(write(decoder=decoder, generation=own, **top)).generation
    assert (first.start_id, first.eos_ids, first.pad_id, first.max_length) == (10, (11, 12), 13, 14)


def test_generation_fields_that_are_missing_are_derived(write: Write) -> None:
    top = {"decoder_start_token_id": ..., "eos_token_id": ...}
    generation = ModelConfig.from_folder(write(decoder={"bos_token_id": 5}, **top)).generation
    assert (generation.start_id, generation.eos_ids, generation.pad_id, generation.max_length) == (5, (), 5, 21)
    assert ModelConfig.from_folder(write()).generation.pad_id == 2  # the end token
    assert (
        ModelConfig.from_folder(write(generation={"pad_token_id": -1})).generation.pad_id == 2
    )  # as some say none


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"max_length": 30}, 30), ({"max_length": 1000}, 64), ({"max_length": 30, "max_new_tokens": 9}, 10), ({}, 21)],
    ids=str,
)
def test_max_length_counts_the_start_token_and_ends_at_the_positions(
    write: Write, fields: dict[str, int], expected: int
) -> None:
    assert ModelConfig.from_folder(write(generation=fields)).generation.max_length == expected
