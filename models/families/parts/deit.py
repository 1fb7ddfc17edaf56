"""Reads DeiT encoders: ViT with a distillation token after the class token (Touvron et al., 2020)."""

from dataclasses import replace

from snapcap.models.dimensions import VisionConfig
from snapcap.models.families.parts import vit
from snapcap.models.fields import Fields
from snapcap.models.names import Names

NAMES = vit.NAMES + Names(
    rules=((r"encoder\.embeddings\.distillation_token", "encoder.distillation_token"),),
)


def read(fields: Fields) -> VisionConfig:
    """Reads the encoder's dimensions.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    return replace(vit.read(fields), family="deit", leading_tokens=2)
