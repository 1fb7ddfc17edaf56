"""What the start has before torch is imported: checkpoint files, plan and artifacts. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmup.artifacts import Fetched

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.preprocess import ImageTransform
    from models.tokenizer import Tokenizer
    from warmup.key import Factors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on local disk, with everything read but its weights."""

    name: str
    folder: Path
    config: "ModelConfig"
    tokenizer: "Tokenizer"
    transform: "ImageTransform"


@dataclass(frozen=True)
class Artifacts:
    """The key this start looked for, and what came of it."""

    key: str
    factors: "Factors"
    fetched: Fetched
    signatures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hit(self) -> bool:
        return self.fetched.result == "hit"
