"""Reads LLaVA (Liu et al., 2023), such as LLaVA 1.5 and JoyCaption: CLIP or SigLIP, two linear layers, and Llama.

The class is `LlavaForConditionalGeneration`. The decoder sees the output of an inner layer of the encoder, so the
layers behind it are not run. `config.json` names this layer, and says whether the first token is left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from snapcap.models.dimensions import ClipConfig, LlavaConfig, Parts, SiglipConfig, VisionConfig
from snapcap.models.families.generation import read_generation
from snapcap.models.families.parts import llama
from snapcap.models.families.parts.vit import clip_names, dimensions, tower, tower_names
from snapcap.models.fields import Fields
from snapcap.models.names import Names
from snapcap.models.text import ImageMarkup

# Default length if a checkpoint names none. Captions are paragraphs, and end by themselves.
_NEW_TOKENS = 256
_CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"
# transformers' default if `config.json` has no vision_config.
_DEFAULT_TOWER = {
    "model_type": _CLIP,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
# transformers 4 and 5 write names with and without these prefixes.
_VISION = r"(?:model\.)?vision_tower(?:\.vision_model)?"
_TEXT = r"(?:model\.)?language_model(?:\.model)?"


def read(config: Fields, generation: Mapping[str, Any]) -> Parts:
    """Reads a checkpoint's dimensions, generation settings and image markup."""
    config.architecture("LlavaForConditionalGeneration")
    vision = _vision(config)
    decoder = _decoder(config)
    sources = (generation, config.values, config.section("text_config").values)
    read = read_generation(sources, decoder, {"bos_token_id": 1, "eos_token_id": 2}, _NEW_TOKENS)
    image = _image_token(config, decoder.vocab_size)
    return Parts(
        vision,
        decoder,
        replace(read, image_id=image),
        _names(vision),
        projected=True,
        markup=ImageMarkup(image),
    )


def _vision(config: Fields) -> VisionConfig:
    if config.values.get("vision_config") is None:
        config = Fields({**config.values, "vision_config": _DEFAULT_TOWER}, config.prefix)
    fields = config.section("vision_config")
    kind = fields.one_of("model_type", (_CLIP, _SIGLIP), _CLIP)
    seen = _clip(fields) if kind == _CLIP else tower(fields, {})
    strategy = config.one_of("vision_feature_select_strategy", ("default", "full"), "default")
    seen["num_layers"] = _layers(config, seen["num_layers"])
    tower_config = ClipConfig if kind == _CLIP else SiglipConfig
    vision: VisionConfig = tower_config(
        family="llava", **seen, final_norm=False, skipped_tokens=1 if strategy == "default" else 0
    )
    if vision.image_tokens < 1:
        raise fields.error("image_size", vision.image_size, "the decoder is left without a token of the image")
    return vision


def _clip(fields: Fields) -> dict[str, Any]:
    """Returns the fields of a ``ClipConfig``. Defaults are those of CLIP ViT-B/32."""
    given = Fields({"patch_size": 32, **fields.values}, fields.prefix)
    return dimensions(given, layer_norm_eps=1e-5, activation="quick_gelu")


def _layers(config: Fields, layers: int) -> int:
    """Returns the number of encoder layers to run, up to the one whose output the decoder sees."""
    number = config.whole("vision_feature_layer", -2, least=-layers, most=layers)
    used = number if number > 0 else layers + 1 + number
    if number == 0 or used < 1:
        raise config.error("vision_feature_layer", number, "the output of a layer is expected")
    return used


def _decoder(config: Fields) -> LlavaConfig:
    text = config.section("text_config")
    tied = config.switch("tie_word_embeddings", False) or text.switch("tie_word_embeddings", False)
    return LlavaConfig(
        **llama.dimensions(text, tied_head=tied),
        projector_activation=config.activation("projector_hidden_act", "gelu"),
        projector_bias=config.switch("multimodal_projector_bias", True),
    )


def _image_token(config: Fields, vocab_size: int) -> int:
    """Returns the placeholder's id. Versions of transformers write it under two names."""
    for field in ("image_token_index", "image_token_id"):
        if config.values.get(field) is not None:
            return config.token(field, vocab_size)
    return Fields({}, config.prefix).token("image_token_index", vocab_size, 32000)


def _names(vision: VisionConfig) -> Names:
    """Returns the names of a checkpoint's tensors. The layers of the encoder that are not run are unused."""
    tower_rules = clip_names(_VISION) if isinstance(vision, ClipConfig) else tower_names(_VISION)
    used = "|".join(str(layer) for layer in range(vision.num_layers))
    return Names(
        rules=(
            *tower_rules,
            (r"(?:model\.)?multi_modal_projector\.linear_(1|2)\.(\w+)", r"projection\1.\2"),
            *llama.layer_names(_TEXT),
            (r"(?:language_model\.)?lm_head\.weight", "decoder.head.weight"),
        ),
        unused=(
            rf"{_VISION}\.encoder\.layers\.(?!(?:{used})\.)\d+\..+",
            rf"{_VISION}\.(?:post_layernorm|head)\..+",
            # Buffers of older versions.
            rf"{_VISION}\.embeddings\.position_ids",
            rf"{_TEXT}\..*rotary_emb\.inv_freq",
        ),
    )
