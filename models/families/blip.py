"""Reads BLIP (Li et al., 2022): a ViT encoder and a BERT decoder without token types.

The class is `BlipForConditionalGeneration`.
"""

from collections.abc import Mapping
from typing import Any

from snapcap.models.dimensions import BertConfig, Parts, VisionConfig
from snapcap.models.families.generation import all_named, given_settings, padding
from snapcap.models.families.parts import bert
from snapcap.models.families.parts.vit import dimensions
from snapcap.models.fields import Fields
from snapcap.models.names import Names
from snapcap.models.text import DEFAULT_NEW_TOKENS, GenerationConfig

_LAYER = r"vision_model\.encoder\.layers\.(\d+)"

NAMES = Names(
    rules=(
        (r"vision_model\.embeddings\.class_embedding", "encoder.class_token"),
        (r"vision_model\.embeddings\.position_embedding", "encoder.position"),
        (r"vision_model\.embeddings\.patch_embedding\.(weight|bias)", r"encoder.patch.\1"),
        (rf"{_LAYER}\.layer_norm(1|2)\.(\w+)", r"encoder.layer.\1.norm\2.\3"),
        (rf"{_LAYER}\.self_attn\.qkv\.(\w+)", r"encoder.layer.\1.qkv.\2"),
        (rf"{_LAYER}\.self_attn\.projection\.(\w+)", r"encoder.layer.\1.out.\2"),
        (rf"{_LAYER}\.mlp\.(fc1|fc2)\.(\w+)", r"encoder.layer.\1.\2.\3"),
        (r"vision_model\.post_layernorm\.(\w+)", r"encoder.norm.\1"),
        *bert.layer_names(r"text_decoder\.bert"),
        *bert.head_names(r"text_decoder\.cls\.predictions"),
    ),
    unused=(r"text_decoder\.bert\.embeddings\.position_ids",),  # a buffer of transformers 4
)


def read(config: Fields, generation: Mapping[str, Any]) -> Parts:
    """Reads a checkpoint's dimensions and generation settings.

    ``generation_config.json`` decides nothing, because transformers generates with the special tokens of the text
    decoder's configuration. Its other settings are listed as unsupported."""
    config.architecture("BlipForConditionalGeneration")
    text = config.section("text_config")
    text.require("is_decoder", True, bert.SEES_NO_IMAGE, default=True)
    tied = config.switch("tie_word_embeddings", True) or text.switch("tie_word_embeddings", True)
    sizes = bert.dimensions(text, vocab_size=30524, positions=512, heads=8)
    vision = dimensions(config.section("vision_config"), image_size=384, layer_norm_eps=1e-5)
    # The settings are those of `BlipForConditionalGeneration.generate`: a caption starts with ``bos_token_id``,
    # [DEC], in place of a prompt's [CLS], ends with ``sep_token_id``, and has at most 20 new tokens, whatever
    # lengths the files name.
    vocabulary = sizes["vocab_size"]
    end = text.token("sep_token_id", vocabulary, 102)
    settings = GenerationConfig(
        start_id=text.token("bos_token_id", vocabulary, 30522),
        eos_ids=(end,),
        pad_id=padding(text.values.get("pad_token_id", 0), end, vocabulary, f"{text.prefix}pad_token_id"),
        max_length=min(DEFAULT_NEW_TOKENS + 1, sizes["n_positions"]),
        not_done=all_named(given_settings((generation, config.values, text.values))),
    )
    return Parts(
        VisionConfig(family="blip", **vision, fused_qkv=True),
        BertConfig(**sizes, family="blip", tied_head=tied, head_activation=sizes["activation"]),
        settings,
        NAMES,
    )
