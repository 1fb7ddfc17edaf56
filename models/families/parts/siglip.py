"""Reads SigLIP encoders (Zhai et al., 2023), and the names of SigLIP's and CLIP's tensors."""

from collections.abc import Mapping
from typing import Any

from snapcap.models.families.parts.vit import Dimensions, dimensions
from snapcap.models.fields import Fields
from snapcap.models.names import Rule

_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}


def tower_names(model: str) -> tuple[Rule, ...]:
    """Returns the renaming rules of SigLIP's module tree under ``model``, a pattern."""
    layer = rf"{model}\.encoder\.layers\.(\d+)"
    return (
        (rf"{model}\.embeddings\.patch_embedding\.(\w+)", r"encoder.patch.\1"),
        (rf"{model}\.embeddings\.position_embedding\.weight", "encoder.position"),
        (rf"{layer}\.layer_norm(1|2)\.(\w+)", r"encoder.layer.\1.norm\2.\3"),
        *(
            (rf"{layer}\.self_attn\.{theirs}\.(\w+)", rf"encoder.layer.\1.{ours}.\2")
            for theirs, ours in _PROJECTIONS.items()
        ),
        (rf"{layer}\.mlp\.(fc1|fc2)\.(\w+)", r"encoder.layer.\1.\2.\3"),
        (rf"{model}\.post_layernorm\.(\w+)", r"encoder.norm.\1"),
    )


def clip_names(model: str) -> tuple[Rule, ...]:
    """Returns the renaming rules of CLIP's module tree, which also has a class token and a norm before its first
    block."""
    return (
        *tower_names(model),
        (rf"{model}\.embeddings\.class_embedding", "encoder.class_token"),
        (rf"{model}\.pre_layrnorm\.(\w+)", r"encoder.embed_norm.\1"),
    )


def tower(fields: Fields, defaults: Mapping[str, Any]) -> Dimensions:
    """Returns the fields of a ``VisionConfig`` that SigLIP has. ``defaults`` override SigLIP's own defaults.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    given = Fields({**defaults, **fields.values}, fields.prefix)
    return dimensions(given, layer_norm_eps=1e-6, activation="gelu_pytorch_tanh")
