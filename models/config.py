"""Model dimensions and generation defaults, read from a checkpoint folder's JSON files.

Everything that snapcap does not support is refused here, by name, before a tensor is read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish")


class ConfigError(ValueError):
    """A configuration that cannot be served; one line that names the field and its value."""

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(f"unsupported {field} = {value!r}: {why}")
        self.field = field
        self.value = value


@dataclass(frozen=True)
class VisionConfig:
    """Dimensions of a ViT encoder. Sizes are (height, width) in pixels."""

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    num_channels: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str
    layer_norm_eps: float
    qkv_bias: bool

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per column and per row; a remainder at the right and bottom is not seen."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def sequence_length(self) -> int:
        """Encoder tokens: one per patch, and the class token."""
        return self.grid[0] * self.grid[1] + 1


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions of a GPT-2 decoder with cross-attention."""

    vocab_size: int
    n_positions: int
    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    activation: str
    layer_norm_eps: float
    scale_attention: bool
    tied_head: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class GenerationConfig:
    """Special token ids, and the default length: ``max_length`` counts the start token, as in transformers."""

    start_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    max_length: int


@dataclass(frozen=True)
class ModelConfig:
    """A captioner: encoder, decoder and how it generates."""

    vision: VisionConfig
    decoder: DecoderConfig
    generation: GenerationConfig

    @property
    def projected(self) -> bool:
        """Whether ``enc_to_dec_proj`` stands between encoder and decoder."""
        return self.vision.hidden_size != self.decoder.hidden_size

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read ``config.json`` and, where it exists, ``generation_config.json``.

        Raises:
            ConfigError: a field has a value that is not supported.
            FileNotFoundError: the folder has no ``config.json``.
        """
        config = read_json(folder / "config.json")
        require(config, "model_type", "vision-encoder-decoder")
        encoder, decoder = section(config, "encoder"), section(config, "decoder")
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else {}
        vision_config = _vision(encoder)
        decoder_config = _decoder(decoder, vision_config.hidden_size)
        return cls(vision_config, decoder_config, _generation(generation, config, decoder, decoder_config))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; what is wrong is named together with the file."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(path.name, "", f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(path.name, type(value).__name__, "a JSON object is expected")
    return value


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    if not isinstance(value, dict):
        raise ConfigError(name, value, "config.json must hold this object")
    return value


def require(config: Mapping[str, Any], field: str, expected: object, prefix: str = "") -> None:
    value = config.get(field)
    if value != expected:
        raise ConfigError(prefix + field, value, f"only {expected!r} is supported")


def positive_int(config: Mapping[str, Any], field: str, prefix: str, default: int | None = None) -> int:
    value = config.get(field, default)
    if not _is_whole(value) or value < 1:
        raise ConfigError(prefix + field, value, "a positive whole number is expected")
    return int(value)


def positive_number(config: Mapping[str, Any], field: str, prefix: str, default: float) -> float:
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(prefix + field, value, "a positive number is expected")
    return float(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # JSON's true is an int to Python


def size_pair(config: Mapping[str, Any], field: str, prefix: str, default: int) -> tuple[int, int]:
    value = config.get(field, default)
    pair = tuple(value) if isinstance(value, list) else (value, value)
    if len(pair) != 2 or not all(_is_whole(side) and side > 0 for side in pair):
        raise ConfigError(prefix + field, value, "a size in pixels, or [height, width], is expected")
    return pair[0], pair[1]


def known_activation(config: Mapping[str, Any], field: str, prefix: str, default: str) -> str:
    value = config.get(field, default)
    if value not in ACTIVATIONS:
        raise ConfigError(prefix + field, value, f"supported are {', '.join(ACTIVATIONS)}")
    return str(value)


def _vision(config: Mapping[str, Any]) -> VisionConfig:
    prefix = "encoder."
    require(config, "model_type", "vit", prefix)
    hidden = positive_int(config, "hidden_size", prefix, 768)
    heads = positive_int(config, "num_attention_heads", prefix, 12)
    if hidden % heads:
        raise ConfigError("encoder.num_attention_heads", heads, f"hidden_size {hidden} is not divisible by it")
    image, patch = size_pair(config, "image_size", prefix, 224), size_pair(config, "patch_size", prefix, 16)
    if patch[0] > image[0] or patch[1] > image[1]:
        raise ConfigError("encoder.patch_size", patch, f"larger than the image, {image}")
    if config.get("num_channels", 3) != 3:
        raise ConfigError("encoder.num_channels", config["num_channels"], "images have 3 channels")
    return VisionConfig(
        image_size=image,
        patch_size=patch,
        num_channels=3,
        hidden_size=hidden,
        num_layers=positive_int(config, "num_hidden_layers", prefix, 12),
        num_heads=heads,
        intermediate_size=positive_int(config, "intermediate_size", prefix, 3072),
        activation=known_activation(config, "hidden_act", prefix, "gelu"),
        layer_norm_eps=positive_number(config, "layer_norm_eps", prefix, 1e-12),
        qkv_bias=bool(config.get("qkv_bias", True)),
    )


def _decoder(config: Mapping[str, Any], encoder_hidden: int) -> DecoderConfig:
    prefix = "decoder."
    require(config, "model_type", "gpt2", prefix)
    if config.get("add_cross_attention", True) is not True:
        raise ConfigError(
            "decoder.add_cross_attention",
            config["add_cross_attention"],
            "a decoder without cross-attention cannot see the image",
        )
    if config.get("scale_attn_by_inverse_layer_idx", False):
        raise ConfigError("decoder.scale_attn_by_inverse_layer_idx", True, "one region serves every layer")
    hidden = positive_int(config, "n_embd", prefix, 768)
    heads = positive_int(config, "n_head", prefix, 12)
    if hidden % heads:
        raise ConfigError("decoder.n_head", heads, f"n_embd {hidden} is not divisible by it")
    cross = config.get("cross_attention_hidden_size")
    if cross is not None and not (cross == encoder_hidden == hidden):
        # GPT-2's cross-attention reads the decoder's own width; transformers then skips the projection.
        raise ConfigError("decoder.cross_attention_hidden_size", cross, f"must equal n_embd {hidden}")
    inner = config.get("n_inner")
    return DecoderConfig(
        vocab_size=positive_int(config, "vocab_size", prefix, 50257),
        n_positions=positive_int(config, "n_positions", prefix, 1024),
        hidden_size=hidden,
        num_layers=positive_int(config, "n_layer", prefix, 12),
        num_heads=heads,
        inner_size=4 * hidden if inner is None else positive_int(config, "n_inner", prefix),
        activation=known_activation(config, "activation_function", prefix, "gelu_new"),
        layer_norm_eps=positive_number(config, "layer_norm_epsilon", prefix, 1e-5),
        scale_attention=bool(config.get("scale_attn_weights", True)),
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def _generation(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    decoder: Mapping[str, Any],
    dimensions: DecoderConfig,
) -> GenerationConfig:
    """transformers' order: ``generation_config.json``, then the top of ``config.json``, then the decoder's part."""

    def look_up(*fields: str) -> Any:
        for field in fields:
            for source in (generation, config, decoder):
                if source.get(field) is not None:
                    return source[field]
        return None

    eos = look_up("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
    start = look_up("decoder_start_token_id", "bos_token_id")
    for field, ids in (("decoder_start_token_id", (start,)), ("eos_token_id", eos_ids)):
        for token in ids:
            if not _is_whole(token) or not 0 <= token < dimensions.vocab_size:
                raise ConfigError(field, token, f"a token id below vocab_size {dimensions.vocab_size} is expected")
    pad = look_up("pad_token_id")
    lengths = {field: look_up(field) for field in ("max_new_tokens", "max_length")}
    if lengths["max_new_tokens"] is not None:
        max_length = positive_int(lengths, "max_new_tokens", "") + 1
    elif lengths["max_length"] is not None:
        max_length = positive_int(lengths, "max_length", "")
    else:
        max_length = 20  # transformers' default
    return GenerationConfig(
        start_id=start,
        eos_ids=eos_ids,
        pad_id=pad if isinstance(pad, int) else (eos_ids[0] if eos_ids else start),
        max_length=min(max_length, dimensions.n_positions),
    )
