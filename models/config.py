"""Reads model dimensions and generation defaults from a checkpoint folder's JSON files.

Everything that snapcap does not support is refused here, by name, before a tensor is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import DecoderConfig, Parts, VisionConfig
from snapcap.models.fields import ConfigError, Fields, json_or_empty, read_json
from snapcap.models.names import Names
from snapcap.models.processing.processor_config import ANSWERS, NESTED_FILE, processed_size
from snapcap.models.text import ChatIds, GenerationConfig, ImageMarkup, Task

__all__ = ["ConfigError", "ModelConfig"]

IMAGE_TOKENS = 256  # greatest number of a picture's tokens by default, for encoders that take pictures of any shape

ChatOf = Callable[[Path, ImageMarkup], ChatIds]

# The module of `models.families` for each ``model_type``. A start imports only the one that it needs.
_FAMILIES = {
    "blip": "blip",
    "florence2": "florence2",
    "git": "git",
    "idefics3": "idefics3",
    "llava": "llava",
    "qwen3_vl": "qwen3_vl",
    "smolvlm": "idefics3",
    "vision-encoder-decoder": "vision_encoder_decoder",
}
_SIZED_BY_PROCESSOR = ("florence2", "qwen3_vl")  # families whose `config.json` has no image size

# Reads a checkpoint's dimensions and generation settings from `config.json` and `generation_config.json`. Raises
# ConfigError if a field has a value that is not supported. Each module of `models.families` has such a `read`.
ReadFamily = Callable[[Fields, Mapping[str, Any]], Parts]


@dataclass(frozen=True)
class ModelConfig:
    """A captioner: its encoder, its decoder, and how it generates.

    family: transformers' ``model_type``.
    names: the checkpoint's names of tensors.
    projected: a linear layer stands between encoder and decoder, such as ``enc_to_dec_proj``.
    tasks: as in ``Parts``.
    markup: the image's place in the chat template, for a family that has one.
    chat: the token ids that the chat template puts around a message.
    stored_dtype: the dtype of the checkpoint's tensors, by its configuration. Empty if it names none.
    """

    family: str
    vision: VisionConfig
    decoder: DecoderConfig
    generation: GenerationConfig
    names: Names
    projected: bool
    tasks: tuple[Task, ...] = ()
    markup: ImageMarkup | None = None
    chat: ChatIds | None = None
    stored_dtype: str = ""

    @property
    def dtype_on_cpu(self) -> str:
        """The default dtype on a CPU that multiplies bfloat16."""
        return "bfloat16" if self.stored_dtype == "bfloat16" else "float32"

    @property
    def prefix(self) -> tuple[int, ...]:
        """Token ids that every row has before its image's tokens."""
        return () if self.chat is None else self.chat.prefix

    @property
    def prefix_length(self) -> int:
        """Number of tokens that every step of a caption attends to beside the row's own.

        The tokens are those before the image's, the image's, and those of a text that belongs to the image.
        """
        text = 0 if self.decoder.reads_prompt else self.decoder.text_tokens
        return len(self.prefix) + self.vision.image_tokens + text

    @property
    def encoded_length(self) -> int:
        """Number of tokens that an encode reads: the prefix's, and a row's first ones if it reads a prompt."""
        return self.prefix_length + (self.decoder.text_tokens if self.decoder.reads_prompt else 0)

    @property
    def cross_size(self) -> int:
        """Width of the states that cross-attention reads."""
        return self.decoder.hidden_size if self.projected else self.vision.hidden_size

    def with_text_tokens(self, tokens: int) -> "ModelConfig":
        """Returns the configuration of an encode that reads so many tokens of text beside the image; 0: its own.
        Raises ConfigError if an encode reads no text, or the model has no positions for such texts."""
        if not tokens:
            return self
        decoder, own = self.decoder, self.decoder.text_tokens
        # The positions of a decoder that reads a prompt are those behind the image.
        room = decoder.n_positions - (0 if decoder.reads_prompt else self.vision.image_tokens)
        if not own:
            raise ConfigError("text_tokens", tokens, "this model reads no text with the image; leave it out")
        if not own <= tokens <= room:
            raise ConfigError("text_tokens", tokens, f"this model has positions for {own} to {room} tokens")
        return replace(self, decoder=replace(decoder, text_tokens=tokens))

    def for_tokens(self, tokens: int) -> "ModelConfig":
        """Returns the configuration of an encoder whose packed pictures have at most so many tokens."""
        vision = replace(self.vision, image_size=(tokens + 1, self.vision.image_size[1]))
        return replace(self, vision=vision)

    def dimensions(self) -> dict[str, Any]:
        """Returns everything that shapes a region, by name, in nested dictionaries: factors of the artifact key."""
        prefix = {"prefix": len(self.prefix)} if self.prefix else {}
        return {
            **prefix,
            "family": self.family,
            "vision": {name: _named(value) for name, value in asdict(self.vision).items()},
            "decoder": asdict(self.decoder),
            "projected": self.projected,
        }

    @classmethod
    def from_folder(
        cls, folder: Path, chat_of: ChatOf | None = None, image_tokens: int = IMAGE_TOKENS
    ) -> "ModelConfig":
        """Reads a folder's ``config.json``, ``generation_config.json`` if it exists, and more files if the family
        needs them.

        An encoder that takes images of any size needs the image processor's file. A chat model needs the chat
        template and tokenizer files.

        Args:
            chat_of: returns the token ids of the chat template. None reads the folder's template.
            image_tokens: the most tokens of a picture, for an encoder that takes pictures of any shape.

        Raises:
            ConfigError: a field has a value that is not supported.
            FileNotFoundError: the folder has no ``config.json``.
        """
        config = Fields(read_json(folder / "config.json"))
        config.require("quantization_config", None, "quantized weights are not read; give the original ones")
        config.require("transformers_weights", None, "rename the weights to model.safetensors")
        family = config.one_of("model_type", _FAMILIES)
        read_family: ReadFamily = import_module(f"snapcap.models.families.{_FAMILIES[family]}").read
        if family in _SIZED_BY_PROCESSOR:
            config = _sized(config, folder, family, image_tokens)
            answers = json_or_empty(folder / NESTED_FILE).get(ANSWERS)  # how the processor reads answers
            if answers is not None:
                config = Fields({**config.values, ANSWERS: answers}, config.prefix)
        parts = read_family(config, json_or_empty(folder / "generation_config.json"))
        dtype = config.values.get("dtype") or config.values.get("torch_dtype")
        read = cls(family, *parts, stored_dtype=dtype if isinstance(dtype, str) else "")
        return read if read.markup is None else _with_template(read, read.markup, folder, chat_of)


def _sized(config: Fields, folder: Path, family: str, image_tokens: int) -> Fields:
    """Returns the configuration with the image size of the image processor, if its file names one."""
    size = processed_size(folder, family, image_tokens)
    if size is None:
        return config
    vision = {**config.section("vision_config").values, "image_size": [*size]}
    return Fields({**config.values, "vision_config": vision}, config.prefix)


def _with_template(config: ModelConfig, markup: ImageMarkup, folder: Path, chat_of: ChatOf | None) -> ModelConfig:
    """Returns the configuration with the chat template's ids, and with the positions that they leave for text.
    Raises ConfigError if there is no template, or it cannot be used."""
    if chat_of is None:
        from snapcap.models.processing.chat import read_chat  # noqa: PLC0415 - imports a tokenizer's library, which other families do not need

        chat_of = read_chat
    chat = chat_of(folder, markup)
    vocabulary = config.decoder.vocab_size
    if max(*chat.prefix, chat.start_id, *chat.opening_ids, *chat.closing_ids) >= vocabulary:
        raise ConfigError("vocab_size", vocabulary, "the chat template's tokens have ids above it")
    config = replace(config, chat=chat)
    positions = config.decoder.n_positions - config.prefix_length
    if positions < 2:
        raise ConfigError(
            "max_position_embeddings",
            config.decoder.n_positions,
            f"an image takes {config.prefix_length} positions and leaves none for text",
        )
    read = config.generation
    # transformers counts the template and the image's placeholders. At least one token can always be generated.
    length = max(read.max_length - config.prefix_length, 2) if read.counts_prompt else read.max_length
    # A caption's first token follows the template, so no first token is forced.
    generation = replace(read, start_id=chat.start_id, max_length=min(length, positions), forced_bos_id=None)
    return replace(config, decoder=replace(config.decoder, n_positions=positions), generation=generation)


def _named(value: Any) -> Any:
    """Returns a list of objects as one object, by number, and other values as they are.

    The factors of an artifact key are numbers, texts, lists of these, and objects.
    """
    if isinstance(value, tuple) and any(isinstance(each, dict) for each in value):
        return {str(number): each for number, each in enumerate(value, 1)}
    return value
