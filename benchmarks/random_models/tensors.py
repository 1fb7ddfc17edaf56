"""Defines the shapes of a random model, and the description of a checkpoint's tensors and files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# With the usual initial 0.02 a tied head repeats the token it has just read for ever; so captions vary.
MATRIX_STD = 0.03
POSITION_STD = 0.5


@dataclass(frozen=True)
class Shapes:
    """Dimensions of an encoder and a decoder of the same width; captions have ``new_tokens``."""

    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    heads: int = 12
    encoder_layers: int = 12
    decoder_layers: int = 12
    inner: int = 3072
    vocab_size: int = 50257
    positions: int = 1024
    new_tokens: int = 20
    dtype: str = "bfloat16"

    @property
    def image_tokens(self) -> int:
        """What the encoder makes of an image: one token a patch, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: normally distributed with ``std``, or ``value`` everywhere where that is 0.

    ``exceptions`` are values by their index in a vector, or by that of a matrix, as torch takes an index.
    """

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    value: float = 0.0
    exceptions: Mapping[Any, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Files:
    """A checkpoint but for its weights: JSON files by name."""

    small: Mapping[str, Mapping[str, Any]]
    tokenizer: Mapping[str, Any]


def vit_config(model_type: str, shapes: Shapes, **further: Any) -> dict[str, Any]:
    """The encoder's part of a ``config.json``."""
    return {
        "model_type": model_type,
        "image_size": shapes.image_size,
        "patch_size": shapes.patch_size,
        "hidden_size": shapes.width,
        "num_hidden_layers": shapes.encoder_layers,
        "num_attention_heads": shapes.heads,
        "intermediate_size": shapes.inner,
        "hidden_act": "gelu",
        **further,
    }


def processor_config(kind: str, shapes: Shapes, **further: Any) -> dict[str, Any]:
    """A ``preprocessor_config.json``."""
    return {
        "image_processor_type": kind,
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
        "size": {"height": shapes.image_size, "width": shapes.image_size},
        "rescale_factor": 1 / 255,
        **further,
    }


def linear(name: str, outputs: int, inputs: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (outputs, inputs), MATRIX_STD)
    yield TensorSpec(f"{name}.bias", (outputs,))


def norm(name: str, width: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (width,), value=1.0)
    yield TensorSpec(f"{name}.bias", (width,))
