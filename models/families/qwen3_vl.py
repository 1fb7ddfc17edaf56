"""Reads Qwen3-VL (Bai et al., 2025): an encoder for pictures of any shape, a projector, and Qwen3.

The class is `Qwen3VLForConditionalGeneration`. A picture becomes a token for each 32 × 32 pixels. A request has
one picture; several pictures and videos are not supported.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from snapcap.models.dimensions import Parts, Qwen3VisionConfig, Qwen3VlConfig
from snapcap.models.families.generation import read_generation
from snapcap.models.families.parts import llama
from snapcap.models.fields import Fields
from snapcap.models.names import Names
from snapcap.models.text import ImageMarkup

# Default length if a checkpoint names none. Captions are paragraphs, and end by themselves.
_NEW_TOKENS = 256
_IMAGE_ID = 151655  # transformers' default
_TEXT_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
}
_THETA, _VISION_THETA = 500000.0, 10000.0  # transformers' defaults
# Tokens of texts that an encode reads: 32 as in other families, and the template's three before a user's text.
_TEXT_TOKENS = 35
_VISION = r"(?:model\.)?visual"
_TEXT = r"(?:model\.)?language_model"

NAMES = Names(
    rules=(
        (rf"{_VISION}\.patch_embed\.proj\.(\w+)", r"encoder.patch.\1"),
        (rf"{_VISION}\.pos_embed\.weight", "encoder.position"),
        (rf"{_VISION}\.blocks\.(\d+)\.norm(1|2)\.(\w+)", r"encoder.layer.\1.norm\2.\3"),
        (rf"{_VISION}\.blocks\.(\d+)\.attn\.qkv\.(\w+)", r"encoder.layer.\1.qkv.\2"),
        (rf"{_VISION}\.blocks\.(\d+)\.attn\.proj\.(\w+)", r"encoder.layer.\1.out.\2"),
        (rf"{_VISION}\.blocks\.(\d+)\.mlp\.linear_fc(1|2)\.(\w+)", r"encoder.layer.\1.fc\2.\3"),
        (rf"{_VISION}\.merger\.norm\.(\w+)", r"projection.norm.\1"),
        (rf"{_VISION}\.merger\.linear_fc(1|2)\.(\w+)", r"projection.fc\1.\2"),
        (rf"{_VISION}\.deepstack_merger_list\.(\d+)\.norm\.(\w+)", r"encoder.tap.\1.norm.\2"),
        (rf"{_VISION}\.deepstack_merger_list\.(\d+)\.linear_fc(1|2)\.(\w+)", r"encoder.tap.\1.fc\2.\3"),
        *llama.layer_names(_TEXT),
        (rf"{_TEXT}\.layers\.(\d+)\.self_attn\.(q|k)_norm\.weight", r"decoder.layer.\1.\2_norm"),
        (r"lm_head\.weight", "decoder.head.weight"),
    ),
)


def read(config: Fields, generation: Mapping[str, Any]) -> Parts:
    """Reads a checkpoint's dimensions, generation settings and image markup."""
    config.architecture("Qwen3VLForConditionalGeneration")
    text = config.section("text_config")
    vision = _vision(config.section("vision_config"))
    decoder = _decoder(config, text)
    taps, layers = len(vision.deepstack), decoder.num_layers
    if taps >= layers:
        raise text.error(
            "num_hidden_layers", layers, f"DeepStack adds to the output of {taps} layers before the last"
        )
    config.section("vision_config").require(
        "out_hidden_size", decoder.hidden_size, "must equal the decoder's hidden_size", default=3584
    )
    defaults = {"bos_token_id": 151643, "eos_token_id": 151645}
    sources = (generation, config.values, text.values)
    read = read_generation(sources, decoder, defaults, _NEW_TOKENS)
    image = config.token("image_token_id", decoder.vocab_size, _IMAGE_ID)
    markup = ImageMarkup(image, reads_ahead=True)
    return Parts(vision, decoder, replace(read, image_id=image), NAMES, projected=True, markup=markup)


def _vision(fields: Fields) -> Qwen3VisionConfig:
    for field, expected in (
        ("patch_size", 16),
        ("spatial_merge_size", 2),
        ("temporal_patch_size", 2),
        ("in_channels", 3),
    ):
        fields.require(field, expected, default=expected)
    hidden, layers = fields.positive_int("hidden_size", 1152), fields.layers("depth", 27)
    heads = fields.heads("num_heads", 16, hidden)
    if hidden // heads % 4:
        raise fields.error("num_heads", heads, "rotary positions of rows and columns need heads of a multiple of 4")
    table = fields.positive_int("num_position_embeddings", 2304)
    side = round(table**0.5)
    if side * side != table:
        raise fields.error("num_position_embeddings", table, "a square number is expected")
    rope = fields.values.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_theta", _VISION_THETA) != _VISION_THETA:
        raise fields.error("rope_parameters", rope, f"only a rope_theta of {_VISION_THETA} is supported")
    return Qwen3VisionConfig(
        family="qwen3_vl",
        image_size=fields.size_pair("image_size", 0),  # read from the image processor's file
        patch_size=(16, 16),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=fields.positive_int("intermediate_size", 4304),
        activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
        layer_norm_eps=1e-6,
        position_side=side,
        deepstack=_taps(fields, layers),
    )


def _taps(fields: Fields, layers: int) -> tuple[int, ...]:
    """Returns the numbers of blocks after which DeepStack reads. The checkpoint has the indices of these blocks."""
    name = "deepstack_visual_indexes"
    found = tuple(1 + index for index in fields.whole_numbers(name, (8, 16, 24), most=layers - 1))
    if list(found) != sorted({*found}):
        raise fields.error(name, fields.values.get(name), "ascending indices of layers are expected")
    return found


def _decoder(config: Fields, text: Fields) -> Qwen3VlConfig:
    text.require("model_type", "qwen3_vl_text", default="qwen3_vl_text")
    given = Fields({**_TEXT_DEFAULTS, **text.values, "model_type": "llama"}, text.prefix)
    rope = text.values.get("rope_parameters") or text.values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise text.error("rope_parameters", rope, "an object is expected")
    tied = config.switch("tie_word_embeddings", False) or text.switch("tie_word_embeddings", False)
    values = llama.dimensions(given, tied_head=tied)
    if values["rope"].scaling:
        raise text.error("rope_parameters", rope, "only the default rotary positions are supported")
    if "rope_theta" not in {**text.values, **rope}:
        values["rope"] = replace(values["rope"], theta=_THETA)
    half = values["head_width"] // 2
    sections = Fields(rope, text.prefix).whole_numbers("mrope_section", (24, 20, 20), most=half)
    if len(sections) != 3 or sum(sections) != half:
        raise text.error("mrope_section", [*sections], f"three numbers with the sum {half} are expected")
    time, rows, columns = sections
    own = {"family": "qwen3_vl_text", "text_tokens": _TEXT_TOKENS}
    return Qwen3VlConfig(**{**values, **own}, sections=(time, rows, columns))
