"""Reads ViT encoders of a vision-encoder-decoder (`google/vit-base-patch16-224-in21k` and the like)."""

from typing import TypedDict

from snapcap.models.dimensions import VisionConfig
from snapcap.models.fields import Fields
from snapcap.models.names import Names

NAMES = Names(
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


def read(fields: Fields) -> VisionConfig:
    """Reads the encoder's dimensions.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    return VisionConfig(family="vit", **dimensions(fields), qkv_bias=fields.switch("qkv_bias", True))


class Dimensions(TypedDict):
    """The fields of ``VisionConfig`` that every encoder has."""

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str
    layer_norm_eps: float


def dimensions(
    fields: Fields, image_size: int = 224, layer_norm_eps: float = 1e-12, activation: str = "gelu"
) -> Dimensions:
    """Reads the dimensions of any encoder that cuts an RGB image into patches.

    Args:
        image_size, layer_norm_eps, activation: the family's defaults.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
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
