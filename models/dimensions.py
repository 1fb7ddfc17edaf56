"""Defines the dimensions of a captioner's parts, from which its regions are built, whatever checkpoint it is.

Everything here but what a family reads beside them is a factor of the artifact key.
"""

from typing import NamedTuple

from snapcap.models.dataclass import dataclass
from snapcap.models.names import Names
from snapcap.models.text import GenerationConfig, ImageMarkup, RopeConfig, Task

MAX_BEAMS = 8  # of one request; what each row bears in mind for its group grows with it
# Of a checkpoint: sequences of several tokens whose last one is made more or less likely, and tokens of each.
MAX_PHRASES, MAX_PHRASE_TOKENS = 128, 8


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A Vision Transformer encoder. Sizes are (height, width) in pixels.

    family: transformers' ``model_type`` of the encoder.
    fused_qkv: the checkpoint holds the projections of queries, keys and values as one.
    leading_tokens: tokens before the patches: the class token, and in DeiT the distillation token.
    positions: a learned position is added to each token.
    final_norm: a norm follows the last block.
    skipped_tokens: of its first tokens, which the decoder does not see.
    """

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
        """Patches per column and per row; a remainder at the right and bottom is not seen."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def sequence_length(self) -> int:
        """Encoder tokens: one per patch, and the leading ones."""
        return self.grid[0] * self.grid[1] + self.leading_tokens

    @property
    def output_shape(self) -> tuple[int, int]:
        """Of an image: encoder tokens and their width."""
        return self.sequence_length, self.hidden_size

    @property
    def image_tokens(self) -> int:
        """Tokens of an image that the decoder sees."""
        return self.sequence_length - self.skipped_tokens

    @property
    def multiplications(self) -> int:
        """Of an image in the linear layers of all blocks, which are most of an encode."""
        return self.num_layers * _layer_products(self.output_shape, self.intermediate_size)


@dataclass(frozen=True, kw_only=True)
class BeitConfig(VisionConfig):
    """An encoder whose attention has a learned bias for each pair of patches, as ``regions.vit`` computes it.

    layer_bias, shared_bias: each layer has its own, or all have one; both are added up.
    layer_scale: a factor for each feature of what a layer adds.
    """

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
    bucketed: positions are looked up as transformers does for images of any size, by rounded fractions of a side.
    """

    leading_tokens: int = 0
    pixel_shuffle: int = 1
    bucketed: bool = False

    @property
    def image_tokens(self) -> int:
        return super().image_tokens // self.pixel_shuffle**2


@dataclass(frozen=True, kw_only=True)
class DavitStage:
    """One stage of DaViT: a convolution that embeds the stage before, and blocks of one shape.

    kernel, stride, padding: of the convolution, in pixels or tokens of the stage before.
    norm_first: the convolution's norm stands before it, over ``input_size`` features, and not after it.
    grid: tokens per column and per row.
    groups: of channels that attend to each other; ``inner_size``: width inside the MLP.
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
        """Of an image: tokens and their width."""
        return self.grid[0] * self.grid[1], self.hidden_size


@dataclass(frozen=True, kw_only=True)
class DavitConfig(VisionConfig):
    """Florence-2's encoder (DaViT, Ding et al., 2022), as ``models.regions.florence2.davit`` computes it.

    Of what every encoder has, ``patch_size`` is the pixels of one token of the last stage, ``leading_tokens``
    counts the mean of all tokens, and sizes are the last stage's, but for ``num_layers``, which are all stages'.

    window: side of the windows inside which tokens attend to each other.
    position_rows: of the tables of a token's row and column.
    """

    stages: tuple[DavitStage, ...]
    window: int
    position_rows: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.stages[-1].grid

    @property
    def multiplications(self) -> int:
        layers = ((each.num_layers, _layer_products(each.output_shape, each.inner_size)) for each in self.stages)
        return sum(2 * count * products for count, products in layers)  # a layer attends twice, each with an MLP


def _layer_products(shape: tuple[int, int], inner: int) -> int:
    """Multiplications of a transformer layer's linear layers, over (tokens, width)."""
    tokens, width = shape
    return tokens * width * (4 * width + 2 * inner)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What every decoder has. ``family``: transformers' ``model_type`` of the decoder.

    tied_head: the head's weight is the token embedding.
    text_tokens: those of the longest text that an encode reads beside the image; shorter ones are padded.
    reads_prompt: that text is the beginning of a row's own tokens, which no step needs to make then; else it is the
        image's, and all steps attend to it.
    """

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
        """Heads of keys and values, as the caches hold them."""
        return self.num_heads


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(DecoderConfig):
    """A decoder that normalises before each part of a block, as ``models.regions.gpt2`` computes it."""

    scale_attention: bool = True


@dataclass(frozen=True, kw_only=True)
class BertConfig(DecoderConfig):
    """A decoder that normalises after each part of a block, as ``models.regions.bert`` computes it.

    embedding_scale: factor of a token's embedding.
    embedding_norm: a norm follows the sum of token and position.
    head_activation: that of the dense layer before the head, which a norm follows; None without such a layer.
    position_offset: rows of the position table before that of the first token.
    learned_positions: the checkpoint holds that table; else it is sinusoidal.
    token_types: rows of the token-type table, of which a caption has the first; 0 without such a table.
    """

    embedding_scale: float = 1.0
    embedding_norm: bool = True
    head_activation: str | None = None
    head_bias: bool = True
    position_offset: int = 0
    learned_positions: bool = True
    token_types: int = 0


@dataclass(frozen=True, kw_only=True)
class GitConfig(BertConfig):
    """A decoder like BERT's without cross-attention: the image's tokens go through its own layers, as a prefix of
    the caption (``models.regions.prefix.git``)."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """A decoder like Llama's (Touvron et al., 2023): the image's tokens go through its own layers, as a prefix of
    what follows (``models.regions.prefix.llama``).

    num_kv_heads: each of them is shared by as many queries' heads (Ainslie et al., 2023).
    head_width: of a head; all of them need not have the decoder's width together.
    """

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
class LlavaConfig(LlamaConfig):
    """Llama's layers behind two linear layers that bring the image's tokens to their width (LLaVA 1.5, Liu et al.,
    2023), as ``models.regions.prefix.llava`` computes them. ``projector_activation``: that between the two."""

    projector_activation: str
    projector_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Florence2Config(BertConfig):
    """BART's encoder (Lewis et al., 2019) over the image's tokens and a task's, before a decoder like BERT's.

    encoder_layers, encoder_heads, encoder_inner_size: of that encoder, whose width is the decoder's.
    text_tokens: those of the longest task, with the tokens around it.
    """

    encoder_layers: int
    encoder_heads: int
    encoder_inner_size: int


class Parts(NamedTuple):
    """What a family reads from its ``config.json``.

    projected: a linear layer brings the encoder's output to the decoder's width.
    tasks: those that give captions, the default one first; none where a model has but one.
    markup: of a family whose checkpoints have a chat template.
    """

    vision: VisionConfig
    decoder: DecoderConfig
    generation: GenerationConfig
    names: Names
    projected: bool = False
    tasks: tuple[Task, ...] = ()
    markup: ImageMarkup | None = None
