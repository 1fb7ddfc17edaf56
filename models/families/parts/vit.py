"""Reads encoders that cut an image into patches: ViT, DeiT, BEiT, CLIP and SigLIP.

DeiT is ViT with a distillation token after the class token (Touvron et al., 2020). Checkpoints of BEiT are
`microsoft/beit-base-patch16-224`, and DiT's document images.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from snapcap.models.dimensions import BeitConfig, VisionConfig
from snapcap.models.fields import Fields
from snapcap.models.names import Names, Rule

VIT_NAMES = Names(
    rules=(
        # Names that `save_pretrained` of transformers 4 and 5 writes.
        (r"encoder\.embeddings\.cls_token", "encoder.class_token"),
        (r"encoder\.embeddings\.position_embeddings", "encoder.position"),
        (r"encoder\.embeddings\.patch_embeddings\.projection\.(weight|bias)", r"encoder.patch.\1"),
        (r"encoder\.encoder\.layer\.(\d+)\.layernorm_before\.(\w+)", r"encoder.layer.\1.norm1.\2"),
        (r"encoder\.encoder\.layer\.(\d+)\.layernorm_after\.(\w+)", r"encoder.layer.\1.norm2.\2"),
        (
            r"encoder\.encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)\.(\w+)",
            r"encoder.layer.\1.\2.\3",
        ),
        (r"encoder\.encoder\.layer\.(\d+)\.attention\.output\.dense\.(\w+)", r"encoder.layer.\1.out.\2"),
        (r"encoder\.encoder\.layer\.(\d+)\.intermediate\.dense\.(\w+)", r"encoder.layer.\1.fc1.\2"),
        (r"encoder\.encoder\.layer\.(\d+)\.output\.dense\.(\w+)", r"encoder.layer.\1.fc2.\2"),
        (r"encoder\.layernorm\.(\w+)", r"encoder.norm.\1"),
        # Names of transformers 5's own modules, which a plain `torch.save(model.state_dict())` keeps.
        (r"encoder\.(?:encoder\.)?layers\.(\d+)\.layernorm_before\.(\w+)", r"encoder.layer.\1.norm1.\2"),
        (r"encoder\.(?:encoder\.)?layers\.(\d+)\.layernorm_after\.(\w+)", r"encoder.layer.\1.norm2.\2"),
        (r"encoder\.(?:encoder\.)?layers\.(\d+)\.attention\.q_proj\.(\w+)", r"encoder.layer.\1.query.\2"),
        (r"encoder\.(?:encoder\.)?layers\.(\d+)\.attention\.k_proj\.(\w+)", r"encoder.layer.\1.key.\2"),
        (r"encoder\.(?:encoder\.)?layers\.(\d+)\.attention\.v_proj\.(\w+)", r"encoder.layer.\1.value.\2"),
        (r"encoder\.(?:encoder\.)?layers\.(\d+)\.attention\.o_proj\.(\w+)", r"encoder.layer.\1.out.\2"),
        (r"encoder\.(?:encoder\.)?layers\.(\d+)\.mlp\.(fc1|fc2)\.(\w+)", r"encoder.layer.\1.\2.\3"),
    ),
    unused=(r"encoder\.pooler\..+", r"encoder\.embeddings\.mask_token"),
)


def read_vit(fields: Fields) -> VisionConfig:
    """Reads the encoder's dimensions."""
    return VisionConfig(family="vit", **dimensions(fields), qkv_bias=fields.switch("qkv_bias", True))


def dimensions(
    fields: Fields, image_size: int = 224, layer_norm_eps: float = 1e-12, activation: str = "gelu"
) -> dict[str, Any]:
    """Reads the fields of ``VisionConfig`` that every encoder which cuts an RGB image into patches has. The
    arguments are the family's defaults."""
    image, patch = fields.size_pair("image_size", image_size), fields.size_pair("patch_size", 16)
    if patch[0] > image[0] or patch[1] > image[1]:
        raise fields.error("patch_size", patch, f"larger than the image, {image}")
    fields.require("num_channels", 3, "images have 3 channels", default=3)
    hidden = fields.positive_int("hidden_size", 768)
    return {
        "image_size": image,
        "patch_size": patch,
        "hidden_size": hidden,
        "num_layers": fields.layers("num_hidden_layers", 12),
        "num_heads": fields.heads("num_attention_heads", 12, hidden),
        "intermediate_size": fields.positive_int("intermediate_size", 3072),
        "activation": fields.activation("hidden_act", activation),
        "layer_norm_eps": fields.positive_number("layer_norm_eps", layer_norm_eps),
    }


DEIT_NAMES = VIT_NAMES + Names(
    rules=((r"encoder\.embeddings\.distillation_token", "encoder.distillation_token"),),
)


def read_deit(fields: Fields) -> VisionConfig:
    """Reads the encoder's dimensions."""
    return replace(read_vit(fields), family="deit", leading_tokens=2)


_TABLE = r"relative_position_bias\.relative_position_bias_table"

BEIT_NAMES = VIT_NAMES + Names(
    rules=(
        (r"encoder\.encoder\.layer\.(\d+)\.lambda_([12])", r"encoder.layer.\1.scale\2"),
        (rf"encoder\.encoder\.layer\.(\d+)\.attention\.attention\.{_TABLE}", r"encoder.layer.\1.relative"),
        (rf"encoder\.encoder\.{_TABLE}", "encoder.relative"),
        # transformers 5's own module names
        (r"encoder\.layers\.(\d+)\.lambda_([12])", r"encoder.layer.\1.scale\2"),
        (rf"encoder\.layers\.(\d+)\.{_TABLE}", r"encoder.layer.\1.relative"),
        (r"encoder\.shared_position_bias\.relative_position_bias_table", "encoder.relative"),
    ),
    unused=(r"encoder\..*relative_position_index",),  # a buffer of older versions
)


def read_beit(fields: Fields) -> BeitConfig:
    """Reads the encoder's dimensions."""
    layer_bias = fields.switch("use_relative_position_bias", False)
    shared_bias = fields.switch("use_shared_relative_position_bias", False)
    sizes = dimensions(fields)
    image, patch = sizes["image_size"], sizes["patch_size"]
    if image[0] != image[1] or patch[0] != patch[1]:  # transformers' own interpolation of positions fails
        raise fields.error("image_size", image, "BEiT takes square images, cut into square patches")
    scale = fields.number("layer_scale_init_value", 0.1)
    return BeitConfig(
        family="beit",
        **sizes,
        positions=fields.switch("use_absolute_position_embeddings", False),
        final_norm=not fields.switch("use_mean_pooling", True),
        layer_bias=layer_bias,
        shared_bias=shared_bias,
        layer_scale=scale > 0,
    )


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


def tower(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a ``VisionConfig`` that SigLIP has. ``defaults`` override SigLIP's own defaults."""
    given = Fields({**defaults, **fields.values}, fields.prefix)
    return dimensions(given, layer_norm_eps=1e-6, activation="gelu_pytorch_tanh")
