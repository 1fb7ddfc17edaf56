"""Holds the checkpoint as the start has it before torch is imported. No torch."""

from collections.abc import Callable
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass

if TYPE_CHECKING:
    from snapcap.models.config import ModelConfig
    from snapcap.models.processing.tokenizer import Tokenizer
    from snapcap.models.processing.transform import ImageTransform


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on local disk, with everything read but its weights, and its tokenizer when it is asked for.

    ``bring``: where ``folder`` has all but the weights, which are prepared ones, what brings the whole checkpoint
    to this machine and returns its folder.
    """

    name: str
    folder: Path
    config: "ModelConfig"
    transform: "ImageTransform"
    bring: Callable[[], Path] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, name: str, folder: Path, config: "ModelConfig", max_pixels: int) -> "Checkpoint":
        """A checkpoint, for pictures of up to ``max_pixels``.

        Raises:
            ConfigError: its files cannot be used.
        """
        from snapcap.models.processing.transform import ImageTransform  # noqa: PLC0415  numpy, which no server waits for to listen

        vision = config.vision
        transform = ImageTransform.from_folder(folder, vision.image_size, max_pixels, vision.family)
        return cls(name, folder, config, transform)

    def whole(self) -> "Checkpoint":
        """The same with its weights, brought here first where they are not.

        Raises:
            CheckpointError: they cannot be had.
        """
        return self if self.bring is None else replace(self, folder=self.bring(), bring=None)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Read once. Raises ConfigError."""
        from snapcap.models.processing.tokenizer import Tokenizer  # noqa: PLC0415  a native library, which the device does not need

        return Tokenizer.from_folder(self.folder, self.config.chat)
