"""Reads GIT (Wang et al., 2022): CLIP's encoder, and BERT's layers over the image's tokens and the caption's.

The class is `GitForCausalLM`. A caption's positions are counted from its own first token.
"""

from collections.abc import Mapping
from typing import Any

from snapcap.models.dimensions import ClipConfig, GitConfig, Parts
from snapcap.models.families.generation import read_generation
from snapcap.models.families.parts import bert
from snapcap.models.families.parts.vit import clip_names, dimensions
from snapcap.models.fields import Fields
from snapcap.models.names import Names

_VISION = r"git\.image_encoder\.vision_model"
# Names of the field for the number of frames of a video: transformers', and the one in the first checkpoints.
_FRAMES = ("num_image_with_embedding", "num_image_with_temporal_embedding")

NAMES = Names(
    rules=(
        *clip_names(_VISION),
        (r"git\.visual_projection\.visual_projection\.0\.(\w+)", r"projection.\1"),
        (r"git\.visual_projection\.visual_projection\.1\.(\w+)", r"projection_norm.\1"),
        *bert.layer_names("git"),
        (r"output\.(weight|bias)", r"decoder.head.\1"),
    ),
    # Buffers of transformers 4.
    unused=(rf"(git|{_VISION})\.embeddings\.position_ids",),
)


def read(config: Fields, generation: Mapping[str, Any]) -> Parts:
    """Reads a checkpoint's dimensions and generation settings."""
    config.architecture("GitForCausalLM")
    for field in _FRAMES:
        config.require(field, None, "checkpoints for video are not supported, only those for images")
    vision = dimensions(config.section("vision_config"), layer_norm_eps=1e-5, activation="quick_gelu")
    decoder = GitConfig(
        **bert.dimensions(config, vocab_size=30522, positions=1024, layers=6),
        family="git",
        tied_head=config.switch("tie_word_embeddings", False),
    )
    defaults = {"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
    return Parts(
        ClipConfig(family="git", **vision),
        decoder,
        read_generation((generation, config.values), decoder, defaults),
        NAMES,
        projected=True,
    )
