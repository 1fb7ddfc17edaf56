"""Describes an export: how an image becomes pixels, the decoder's shapes, and where a caption ends.

The module imports nothing slow, because the server reads a description at its start.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ENCODER, DECODER, TOKENIZER = "encoder.onnx", "decoder.onnx", "tokenizer.json"
_FILE = "captioner.json"


@dataclass(frozen=True)
class Description:
    """The facts about an export beside its two models.

    resample: Pillow's number of the filter.
    ends: the tokens that end a caption. There may be none.
    limit: greatest number of tokens after the start token.
    """

    height: int
    width: int
    resample: int
    rescale: float
    mean: list[float]
    std: list[float]
    layers: int
    heads: int
    head_size: int
    start: int
    ends: list[int]
    limit: int

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Description":
        return cls(**json.loads((folder / _FILE).read_text()))

    @property
    def cache_names(self) -> list[str]:
        """Names of the keys and values of each layer, in the order of the decoder's inputs."""
        return [f"{what}_{layer}" for layer in range(self.layers) for what in ("key", "value")]
