"""Lists the operators, with shapes, that the eager regions launch on a GPU and that the driver is slow to load.

It imports no torch.

CUDA loads a kernel when it is first launched, with all that was compiled beside it, and the products' library makes
its handles with the first product: of a first caption's 0.4 s on an H200 nearly all is that. Each operator here is
one that a region calls, with inputs of the same dtypes, shapes and strides, as kernels are chosen by these.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import BeitConfig, BertConfig, DecoderConfig, GitConfig
from snapcap.warmup.plan.plan import Plan

INT64, FP32 = "int64", "float32"


class Like(NamedTuple):
    """A tensor's dtype, shape and strides."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def turned(self) -> "Like":
        """Its last two dimensions the other way round, as ``Tensor.mT``."""
        *outer, rows, columns = self.shape
        *steps, row, column = self.strides
        return Like(self.dtype, (*outer, columns, rows), (*steps, column, row))


@dataclass(frozen=True)
class Launch:
    """An operator of ``torch.ops.aten``, and the first of its tensors: all that its kernel is chosen by."""

    operator: str
    tensors: tuple[Like, ...]


def eager_launches(config: ModelConfig, plan: Plan, rows: int) -> Iterator[Launch]:
    """In the order of a first caption, with encoder and decoder in buckets of ``rows``, on CUDA."""
    yield from _encoder(config, plan.dtype, rows)
    yield from _decoder(config.decoder, plan, rows, config.vision.sequence_length)


def _encoder(config: ModelConfig, dtype: str, rows: int) -> Iterator[Launch]:
    vision = config.vision
    width, tokens = vision.hidden_size, vision.sequence_length
    (down, across), (height, breadth) = vision.grid, vision.patch_size
    seen = rows, down * height, across * breadth, 3  # without a remainder at the right and bottom
    image = _like(FP32, *seen)
    yield Launch("copy_", (image, _like("uint8", *seen)))
    yield Launch("mul.Tensor", (image, _like(FP32, 1)))
    yield Launch("sub.Tensor", (image, _like(FP32, 3)))
    yield Launch("div.Tensor", (image, _like(FP32, 3)))
    yield _linear(dtype, rows * down * across, 3 * height * breadth, width)
    yield _norm(dtype, rows, tokens, width)
    yield _linear(dtype, rows * tokens, width, 3 * width)
    biased = isinstance(vision, BeitConfig) and vision.relative
    yield _attention(dtype, rows, tokens, width, vision.num_heads, biased)
    yield _linear(dtype, rows * tokens, width, width)
    yield _linear(dtype, rows * tokens, width, vision.intermediate_size)
    yield _linear(dtype, rows * tokens, vision.intermediate_size, width)
    decoder = config.decoder
    if isinstance(decoder, GitConfig):
        yield from _git_prefix(config, decoder, dtype, rows)
    else:
        yield _linear(dtype, rows * tokens, config.cross_size, decoder.num_layers * 2 * decoder.hidden_size)


def _git_prefix(config: ModelConfig, decoder: GitConfig, dtype: str, rows: int) -> Iterator[Launch]:
    tokens, width, inner = config.vision.sequence_length, decoder.hidden_size, decoder.inner_size
    yield _linear(dtype, rows * tokens, config.vision.hidden_size, width)
    yield _norm(dtype, rows, tokens, width)
    if decoder.num_layers > 1:
        yield _linear(dtype, rows * tokens, width, 3 * width)
        yield _attention(dtype, rows, tokens, width, decoder.num_heads)
        yield _linear(dtype, rows * tokens, width, width)
        yield _linear(dtype, rows * tokens, width, inner)
        yield _linear(dtype, rows * tokens, inner, width)
    yield _linear(dtype, rows * tokens, width, 2 * width)


def _decoder(decoder: DecoderConfig, plan: Plan, rows: int, seen: int) -> Iterator[Launch]:
    dtype, length, width = plan.dtype, plan.cache_length, decoder.hidden_size
    heads, head_dim = decoder.num_heads, decoder.head_dim
    table = _like(dtype, decoder.vocab_size, width)
    yield Launch("embedding", (table, _like(INT64, rows)))
    yield _norm(dtype, rows, width)
    yield _linear(dtype, rows, width, 3 * width)
    values = _like(dtype, rows, heads, length, head_dim)
    at = Like(INT64, (rows, heads, 1, head_dim), (1, 0, 1, 0))
    own = Like(dtype, (rows, heads, 1, head_dim), (3 * width, head_dim, head_dim, 1))  # of one product with its key
    yield Launch("scatter_.src", (values, at, own))
    yield Launch("gt.Tensor", (_like(INT64, length), _like(INT64, rows, 1, 1, 1)))
    if isinstance(decoder, GitConfig):
        yield from _attention_of_both(decoder, dtype, rows, seen, length)
        yield _linear(dtype, rows, width, width)
    else:
        for keys in (length, seen):
            cache = _like(dtype, rows * heads, keys, head_dim)
            yield Launch("bmm", (_like(dtype, rows * heads, 1, head_dim), cache.turned))
            yield Launch("_softmax", (_like(FP32, rows, heads, 1, keys),))
            yield Launch("bmm", (_like(dtype, rows * heads, 1, keys), cache))
            yield _linear(dtype, rows, width, width)
    yield _linear(dtype, rows, width, decoder.inner_size)
    yield _linear(dtype, rows, decoder.inner_size, width)
    if isinstance(decoder, BertConfig):
        yield _linear(dtype, rows, width, decoder.vocab_size)
    else:
        yield Launch("mm", (_like(dtype, rows, width), table.turned))
    yield Launch("argmax", (_like(dtype, rows, decoder.vocab_size),))


def _attention_of_both(decoder: DecoderConfig, dtype: str, rows: int, *lengths: int) -> Iterator[Launch]:
    """One softmax over caches of these lengths."""
    heads, head_dim, every = decoder.num_heads, decoder.head_dim, sum(lengths)
    yield Launch("_softmax", (_like(FP32, rows, heads, 1, every),))
    for keys in lengths:
        cache = _like(dtype, rows * heads, keys, head_dim)
        yield Launch("bmm", (_like(dtype, rows * heads, 1, head_dim), cache.turned))
        yield Launch("bmm", (Like(dtype, (rows * heads, 1, keys), (every, keys, 1)), cache))


def _attention(dtype: str, rows: int, tokens: int, width: int, heads: int, biased: bool = False) -> Launch:
    """Queries, keys and values as the three parts of one product; ``biased``: the scores are."""
    head_dim, step = width // heads, 3 * width
    part = Like(dtype, (rows, heads, tokens, head_dim), (tokens * step, head_dim, step, 1))
    # As `scaled_dot_product_attention` chooses without cuDNN (`warmup.runtime.device`).
    flash = dtype != FP32 and not biased
    kind = "flash" if flash else "efficient"
    return Launch(f"_scaled_dot_product_{kind}_attention", (part, part, part))


def _linear(dtype: str, rows: int, inputs: int, outputs: int) -> Launch:
    weight = _like(dtype, outputs, inputs).turned
    return Launch("addmm", (_like(dtype, outputs), _like(dtype, rows, inputs), weight))


def _norm(dtype: str, *shape: int) -> Launch:
    return Launch("native_layer_norm", (_like(dtype, *shape),))


def _like(dtype: str, *shape: int) -> Like:
    """Contiguous."""
    strides = accumulate(reversed(shape[1:]), lambda step, size: step * size, initial=1)
    return Like(dtype, shape, tuple(reversed(list(strides))))
