"""Reads Idefics3 (Laurençon et al., 2024) and SmolVLM (Marafioti et al., 2025).

Both consist of SigLIP, a pixel shuffle and Llama. The classes are `Idefics3ForConditionalGeneration` and
`SmolVLMForConditionalGeneration`, which treat a single image alike. An image is encoded as one tile, and not split
into several as the checkpoint's image processor can do.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from snapcap.models.dimensions import Idefics3Config, Parts, SiglipConfig
from snapcap.models.families.generation import read_generation
from snapcap.models.families.parts import llama
from snapcap.models.families.parts.vit import tower, tower_names
from snapcap.models.fields import Fields
from snapcap.models.names import Names
from snapcap.models.text import ImageMarkup

_ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
# Default length if a checkpoint names none. An answer is one sentence or several, and ends by itself.
_NEW_TOKENS = 128
_VISION_DEFAULTS = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_IMAGE_ID = 128257  # transformers' default
_AROUND, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"

NAMES = Names(
    rules=(
        *tower_names(r"model\.vision_model"),
        (r"model\.connector\.modality_projection\.proj\.weight", "projection"),
        *llama.layer_names(r"model\.text_model"),
        (r"lm_head\.weight", "decoder.head.weight"),
    ),
    # Buffers of older versions.
    unused=(
        r"model\.text_model\..*rotary_emb\.inv_freq",
        r"model\.vision_model\.embeddings\.position_ids",
    ),
)


def read(config: Fields, generation: Mapping[str, Any]) -> Parts:
    """Reads a checkpoint's dimensions, generation settings and image markup."""
    config.architecture(*_ARCHITECTURES)
    text = config.section("text_config")
    tied = config.switch("tie_word_embeddings", False)
    decoder = Idefics3Config(**llama.dimensions(text, tied_head=tied))
    # transformers writes its default padding token beside the text part's own, and says not to use it.
    settings = {field: value for field, value in config.values.items() if field != "pad_token_id"}
    sources = (generation, settings, text.values)
    read = read_generation(sources, decoder, {"bos_token_id": 1}, _NEW_TOKENS)
    return Parts(
        _vision(config),
        decoder,
        replace(read, image_id=config.whole("image_token_id", _IMAGE_ID)),
        NAMES,
        projected=True,
        markup=ImageMarkup(_IMAGE, before=f"{_AROUND}{_GLOBAL}", after=_AROUND),
    )


def _vision(config: Fields) -> SiglipConfig:
    fields = config.section("vision_config")
    shuffle = config.positive_int("scale_factor", 2)
    vision = SiglipConfig(
        family=str(config.values["model_type"]),
        **tower(fields, _VISION_DEFAULTS),
        pixel_shuffle=shuffle,
        bucketed=True,
    )
    rows, columns = vision.grid
    if rows != columns or rows % shuffle:
        raise fields.error("image_size", vision.image_size, f"{rows}×{columns} patches are no squares of {shuffle}")
    return vision
