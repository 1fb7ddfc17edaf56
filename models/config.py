"""Reads model dimensions and generation defaults from a checkpoint folder's JSON files.

Everything that snapcap does not support is refused here, by name, before a tensor is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from snapcap.models.dimensions import DecoderConfig, GenerationConfig, Parts, Task, VisionConfig
from snapcap.models.families import blip, florence2, git, vision_encoder_decoder
from snapcap.models.fields import ConfigError, Fields, json_or_empty, read_json
from snapcap.models.names import Names

__all__ = ["ConfigError", "ModelConfig"]

_FAMILIES: dict[str, Callable[[Fields, Mapping[str, Any]], Parts]] = {
    "blip": blip.read,
    "florence2": florence2.read,
    "git": git.read,
    "vision-encoder-decoder": vision_encoder_decoder.read,
}


@dataclass(frozen=True)
class ModelConfig:
    """A captioner: encoder, decoder and how it generates.

    family: transformers' ``model_type``.
    names: what the checkpoint calls its tensors.
    projected: a linear layer stands between encoder and decoder, as ``enc_to_dec_proj``.
    tasks: as ``Parts`` has them.
    """

    family: str
    vision: VisionConfig
    decoder: DecoderConfig
    generation: GenerationConfig
    names: Names
    projected: bool
    tasks: tuple[Task, ...] = ()

    @property
    def prefix_length(self) -> int:
        """Tokens that every step of a caption attends to beside its own: the image's, and those of a text."""
        return self.vision.sequence_length + self.decoder.text_tokens

    @property
    def cross_size(self) -> int:
        """Width of the states that cross-attention reads."""
        return self.decoder.hidden_size if self.projected else self.vision.hidden_size

    def dimensions(self) -> dict[str, Any]:
        """Everything that shapes a region, nested, by name: factors of the artifact key."""
        return {
            "family": self.family,
            "vision": {name: _named(value) for name, value in asdict(self.vision).items()},
            "decoder": asdict(self.decoder),
            "projected": self.projected,
        }

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read ``config.json`` and, where it exists, ``generation_config.json``.

        Raises:
            ConfigError: a field has a value that is not supported.
            FileNotFoundError: the folder has no ``config.json``.
        """
        config = Fields(read_json(folder / "config.json"))
        family = config.values.get("model_type")
        if family not in tuple(_FAMILIES):
            raise config.error("model_type", family, f"supported are {', '.join(_FAMILIES)}")
        parts = _FAMILIES[family](config, json_or_empty(folder / "generation_config.json"))
        return cls(family, *parts)


def _named(value: Any) -> Any:
    """A factor is a number, a text or a list of these: objects in a list become an object, by their number."""
    if isinstance(value, tuple) and any(isinstance(each, dict) for each in value):
        return {str(number): each for number, each in enumerate(value, 1)}
    return value
