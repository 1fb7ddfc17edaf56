"""Reads BEiT encoders of a vision-encoder-decoder.

Checkpoints are `microsoft/beit-base-patch16-224`, and DiT's document images.
"""

from snapcap.models.dimensions import BeitConfig
from snapcap.models.families.parts import vit
from snapcap.models.fields import Fields
from snapcap.models.names import Names

_TABLE = r"relative_position_bias\.relative_position_bias_table"

NAMES = vit.NAMES + Names(
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


def read(fields: Fields) -> BeitConfig:
    """Reads the encoder's dimensions.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    layer_bias = fields.switch("use_relative_position_bias", False)
    shared_bias = fields.switch("use_shared_relative_position_bias", False)
    dimensions = vit.dimensions(fields)
    image, patch = dimensions["image_size"], dimensions["patch_size"]
    if image[0] != image[1] or patch[0] != patch[1]:  # transformers' own interpolation of positions fails
        raise fields.error("image_size", image, "BEiT takes square images, cut into square patches")
    scale = fields.values.get("layer_scale_init_value", 0.1)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise fields.error("layer_scale_init_value", scale, "a number is expected")
    return BeitConfig(
        family="beit",
        **dimensions,
        positions=fields.switch("use_absolute_position_embeddings", False),
        final_norm=not fields.switch("use_mean_pooling", True),
        layer_bias=layer_bias,
        shared_bias=shared_bias,
        layer_scale=scale > 0,
    )
