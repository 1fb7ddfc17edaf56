"""Defines the dimensions of a captioner's parts, from which its regions are built, for every family.

All of them are factors of the artifact key, except the fields of ``Parts`` beside ``vision``, ``decoder`` and
``projected``. Each class names the module of `models.layers` that computes its part.
"""

from typing import Any, ClassVar, Literal, NamedTuple

from snapcap.models.dataclass import dataclass
from snapcap.models.names import Names
from snapcap.models.text import GenerationConfig, ImageMarkup, RopeConfig, Task

MAX_BEAMS = 8  # greatest number of beams in a request; each row's state for its group grows with it
# Greatest number of biased sequences of several tokens in a checkpoint, and of tokens in such a sequence.
MAX_PHRASES, MAX_PHRASE_TOKENS = 128, 8
PENALTIES, SAMPLING, BEAMS = "decoder_penalties", "decoder_sampling", "decoder_beams"
# Regions that run only for requests that ask for them. No start waits for them.
ON_DEMAND = frozenset({PENALTIES, SAMPLING, BEAMS})


def forced_end(token: Any) -> Any:
    """Returns the number in a row's ``forced`` tokens that makes a beam which gets that far end with ``token``.

    The number is below -1, and any number below 0 lets the beams choose, so it never looks like a prompt's token.
    """
    return -2 - token


def stage_regions(number: int) -> tuple[str, str]:
    """Returns the names of the two regions of a vision stage, counted from 1: the one before its blocks, and the
    block."""
    part = "" if number == 1 else f"_{number}"
    return f"encoder_before{part}", f"encoder_block{part}"


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A Vision Transformer encoder. Sizes are (height, width) in pixels.

    family: transformers' ``model_type`` of the encoder.
    fused_qkv: the checkpoint holds the projections of queries, keys and values as one.
    leading_tokens: tokens before the patches: the class token, and in DeiT the distillation token.
    positions: a learned position is added to each token.
    final_norm: a norm follows the last block.
    skipped_tokens: number of first tokens that the decoder does not see.
    """

    layers: ClassVar[str] = "vit"

    family: str
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    num_channels: int = 3
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str
    layer_norm_eps: float
    qkv_bias: bool = True
    fused_qkv: bool = False
    leading_tokens: int = 1
    positions: bool = True
    final_norm: bool = True
    skipped_tokens: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches per column and per row. A remainder at the right and bottom is cut off."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def sequence_length(self) -> int:
        """Number of encoder tokens: one per patch, and the leading ones."""
        return self.grid[0] * self.grid[1] + self.leading_tokens

    @property
    def output_shape(self) -> tuple[int, int]:
        """Encoder tokens of an image, and their width."""
        return self.sequence_length, self.hidden_size

    @property
    def stage_shapes(self) -> tuple[tuple[int, tuple[int, int]], ...]:
        """Number of blocks of each stage, and the tokens of an image in the stage and their width."""
        return ((self.num_layers, self.output_shape),)

    @property
    def image_tokens(self) -> int:
        """Number of an image's tokens that the decoder sees."""
        return self.sequence_length - self.skipped_tokens

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """For an encoder that takes pictures of any shape, the numbers of tokens to which pictures are padded, the
        greatest last. Empty if all pictures have one shape."""
        return ()

    @property
    def taps(self) -> tuple[int, ...]:
        """Numbers of blocks after each of which the decoder is given features of the image beside the encoder's
        output."""
        return ()

    @property
    def multiplications(self) -> int:
        """Number of multiplications in the linear layers of all blocks, which are most of an encode, for one
        image."""
        return self.num_layers * _layer_products(self.output_shape, self.intermediate_size)


@dataclass(frozen=True, kw_only=True)
class BeitConfig(VisionConfig):
    """BEiT's encoder, as ``layers.vit`` computes it: its attention can have a learned bias for each pair of
    tokens.

    layer_bias: each layer has a bias table of its own.
    shared_bias: all layers share a bias table. If there are both, their sum is the bias.
    layer_scale: the output of each part of a layer is multiplied by a factor for each feature.
    """

    layers: ClassVar[str] = "beit"

    layer_bias: bool
    shared_bias: bool
    layer_scale: bool

    @property
    def relative(self) -> bool:
        return self.layer_bias or self.shared_bias


@dataclass(frozen=True, kw_only=True)
class ClipConfig(VisionConfig):
    """CLIP's encoder (Radford et al., 2021): a ViT with a norm before its first block too."""


@dataclass(frozen=True, kw_only=True)
class SiglipConfig(VisionConfig):
    """SigLIP's encoder (Zhai et al., 2023): a ViT without a class token.

    pixel_shuffle: each square of so many patches a side becomes one token of the decoder.
    bucketed: positions are looked up by rounded fractions of a side, as transformers does for images of any size.
    """

    layers: ClassVar[str] = "siglip"

    leading_tokens: int = 0
    pixel_shuffle: int = 1
    bucketed: bool = False

    @property
    def image_tokens(self) -> int:
        return super().image_tokens // self.pixel_shuffle**2


_TOKEN_BUCKETS = (64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(VisionConfig):
    """Qwen3-VL's encoder (Bai et al., 2025), as ``models.layers.qwen3_vision`` computes it.

    The encoder takes packed pictures of any shape (``models.processing.packed``). ``image_size`` is the height and
    width of the packed array, whose last row holds the picture's grid. A token of the decoder combines 2 × 2
    patches of 16 × 16 pixels.

    position_side: rows and columns of the position table, between which a picture's positions are interpolated.
    deepstack: numbers of blocks after which features are tapped (DeepStack, Meng et al., 2024).
    """

    layers: ClassVar[str] = "qwen3_vision"

    leading_tokens: int = 0
    fused_qkv: bool = True
    position_side: int
    deepstack: tuple[int, ...]

    @property
    def image_tokens(self) -> int:
        return self.image_size[0] - 1

    @property
    def sequence_length(self) -> int:
        return 4 * self.image_tokens

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return (*(size for size in _TOKEN_BUCKETS if size < self.image_tokens), self.image_tokens)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.deepstack


@dataclass(frozen=True, kw_only=True)
class DavitStage:
    """A stage of DaViT: a convolution that embeds the stage before, and blocks of the same shape.

    input_size: features of a token of the stage before, or 3 for pixels.
    groups: number of groups of channels in which channels attend to each other.
    inner_size: width inside the MLP.
    kernel, stride, padding: of the convolution, in pixels or tokens of the stage before.
    norm_first: a norm over ``input_size`` features stands before the convolution. Otherwise a norm stands after
        it.
    grid: tokens per column and per row.
    """

    input_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    groups: int
    inner_size: int
    kernel: int
    stride: int
    padding: int
    norm_first: bool
    grid: tuple[int, int]

    @property
    def output_shape(self) -> tuple[int, int]:
        """Tokens of an image, and their width."""
        return self.grid[0] * self.grid[1], self.hidden_size


@dataclass(frozen=True, kw_only=True)
class DavitConfig(VisionConfig):
    """Florence-2's encoder (DaViT, Ding et al., 2022), as ``models.layers.davit`` computes it.

    Some fields of every encoder have a special meaning: ``patch_size`` is the pixels of a token of the last stage,
    ``leading_tokens`` counts the mean of all tokens, and ``num_layers`` is the sum over all stages. Other sizes
    are the last stage's.

    window: side of the windows inside which tokens attend to each other.
    position_rows: number of rows in each of the two position tables.
    """

    layers: ClassVar[str] = "davit"

    stages: tuple[DavitStage, ...]
    window: int
    position_rows: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.stages[-1].grid

    @property
    def stage_shapes(self) -> tuple[tuple[int, tuple[int, int]], ...]:
        return tuple((stage.num_layers, stage.output_shape) for stage in self.stages)

    @property
    def multiplications(self) -> int:
        layers = ((each.num_layers, _layer_products(each.output_shape, each.inner_size)) for each in self.stages)
        # A block attends twice, each time with an MLP.
        return sum(2 * count * products for count, products in layers)


def _layer_products(shape: tuple[int, int], inner: int) -> int:
    """Returns the multiplications of a transformer layer's linear layers, for a shape of (tokens, width)."""
    tokens, width = shape
    return tokens * width * (4 * width + 2 * inner)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The dimensions that every decoder has.

    family: transformers' ``model_type`` of the decoder.
    tied_head: the head's weight is the token embedding.
    text_tokens: tokens of the longest text that an encode reads beside the image. Shorter texts are padded.
    reads_prompt: the text is the beginning of a row's own tokens, which then need no steps. Otherwise the text
        belongs to the image, and all steps attend to it.
    prefix: the layers through which the image's tokens go before a caption: none, those of an encoder of its own,
        or the decoder's own, for which the tokens are a prefix of the caption.
    """

    layers: ClassVar[str]
    prefix: ClassVar[Literal["none", "encoder", "decoder"]] = "none"

    family: str
    vocab_size: int
    n_positions: int
    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    activation: str
    layer_norm_eps: float
    tied_head: bool = True
    text_tokens: int = 0
    reads_prompt: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values in the caches."""
        return self.num_heads

    @property
    def prefix_layers(self) -> int:
        """Number of blocks through which the image's tokens go. The decoder's last layer is not run as a block,
        because only its keys and values are needed."""
        return self.num_layers - 1 if self.prefix == "decoder" else 0


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(DecoderConfig):
    """GPT-2's decoder, with a norm before each part of a block, as ``models.layers.gpt2`` computes it."""

    layers: ClassVar[str] = "gpt2"

    scale_attention: bool = True


@dataclass(frozen=True, kw_only=True)
class BertConfig(DecoderConfig):
    """A decoder with a norm after each part of a block, as ``models.layers.bert`` computes it.

    embedding_scale: factor of a token's embedding.
    embedding_norm: a norm follows the sum of token and position.
    head_activation: activation of a dense layer before the head, which a norm follows. None without such a layer.
    position_offset: rows of the position table before the first token's row.
    learned_positions: the checkpoint holds the position table. Otherwise it is sinusoidal.
    token_types: rows of the token-type table, of which captions use the first. 0 without such a table.
    """

    layers: ClassVar[str] = "bert"

    embedding_scale: float = 1.0
    embedding_norm: bool = True
    head_activation: str | None = None
    head_bias: bool = True
    position_offset: int = 0
    learned_positions: bool = True
    token_types: int = 0


@dataclass(frozen=True, kw_only=True)
class GitConfig(BertConfig):
    """GIT's decoder: BERT's layers without cross-attention, as ``models.layers.git`` computes them.

    The image's tokens go through the same layers, as a prefix of the caption.
    """

    layers: ClassVar[str] = "git"
    prefix: ClassVar[Literal["none", "encoder", "decoder"]] = "decoder"


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama's decoder (Touvron et al., 2023), as ``models.layers.llama`` computes it.

    The image's tokens go through the same layers, as a prefix of the text.

    num_kv_heads: number of heads of keys and values. Each is shared by the same number of query heads (Ainslie et
        al., 2023).
    head_width: width of a head. The heads together may be wider or narrower than the decoder.
    """

    layers: ClassVar[str] = "llama"
    prefix: ClassVar[Literal["none", "encoder", "decoder"]] = "decoder"

    num_kv_heads: int
    head_width: int
    rope: RopeConfig
    text_tokens: int = 32
    reads_prompt: bool = True

    @property
    def head_dim(self) -> int:
        return self.head_width

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class Idefics3Config(LlamaConfig):
    """Llama's decoder behind Idefics3's projection of squares of patches, as ``models.layers.idefics3`` computes
    it."""

    layers: ClassVar[str] = "idefics3"


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(LlamaConfig):
    """Llama's decoder behind LLaVA's projector (LLaVA 1.5, Liu et al., 2023), as ``models.layers.llava``
    computes it.

    The projector's two linear layers bring the image's tokens to the decoder's width.

    projector_activation: activation between the two linear layers.
    """

    layers: ClassVar[str] = "llava"

    projector_activation: str
    projector_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Qwen3VlConfig(LlamaConfig):
    """Qwen3's decoder (Yang et al., 2025) behind Qwen3-VL's projector, as ``models.layers.qwen3_vl`` computes it.

    Queries and keys of each head have a norm. A token has three positions: time, row and column.

    sections: numbers of a head's frequencies that turn with time, row and column.
    """

    layers: ClassVar[str] = "qwen3_vl"

    sections: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Florence2Config(BertConfig):
    """BART's encoder (Lewis et al., 2019) over the tokens of an image and of a task, before a decoder like BERT's.

    encoder_layers, encoder_heads, encoder_inner_size: dimensions of BART's encoder, whose width is the decoder's.
    text_tokens: tokens of the longest task, its start and end token included.
    """

    layers: ClassVar[str] = "bart"
    prefix: ClassVar[Literal["none", "encoder", "decoder"]] = "encoder"

    encoder_layers: int
    encoder_heads: int
    encoder_inner_size: int

    @property
    def prefix_layers(self) -> int:
        return self.encoder_layers


class Parts(NamedTuple):
    """Everything that a family reads from its ``config.json``.

    projected: a linear layer brings the encoder's output to the decoder's width.
    tasks: the tasks that give captions, the default one first. Empty for a model without named tasks.
    markup: the image's place in the chat template, for a family that has one.
    """

    vision: VisionConfig
    decoder: DecoderConfig
    generation: GenerationConfig
    names: Names
    projected: bool = False
    tasks: tuple[Task, ...] = ()
    markup: ImageMarkup | None = None
