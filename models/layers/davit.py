"""Computes DaViT (Ding et al., 2022), Florence-2's image encoder, in stages of different widths and token counts.

A block attends twice: first tokens attend to tokens inside windows, then channels attend to channels over the
whole image. A depthwise convolution before each attention and each MLP encodes where a token is.

B is the padded batch, S = rows · columns the number of tokens of the stage, D its hidden size. Linear layers are
stored [out, in]. The embedding of a stage is stored likewise, with the tokens under its kernel row by row as the
input.

No convolution calls the library. cuDNN's first convolutions take three seconds on a GPU, most of a compiled start,
and want channels first, where tokens have them last. Written as sums and products, convolutions fuse with the
norms and additions around them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import DavitConfig, DavitStage, stage_regions
from snapcap.models.layers.attention import join_heads, split_heads
from snapcap.models.layers.linear import Activation, activation, linear
from snapcap.models.layers.vit import Activated, activated
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource, takes_weights_of

# Rows of weights are padded to this many features: 16 bytes of a 16-bit dtype. Unaligned rows would give a GPU
# slower matrix products.
_ALIGNED = 8


def embed_pixels(
    pixels: Tensor,  # [B, height, width, 3] uint8
    /,
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    weight: Tensor,  # [D, kernel * kernel * 3], padded with zeros
    bias: Tensor,  # [D]
    norm_weight: Tensor,  # [D], or [3] if `norm_first`
    norm_bias: Tensor,
    *,
    kernel: int,
    stride: int,
    padding: int,
    norm_first: bool,
    eps: float,
) -> Tensor:  # [B, S, D]
    """Returns the tokens of the first stage: normalises the image in fp32 and embeds it."""
    image = ((pixels.float() * rescale - mean) / std).to(weight.dtype)
    return _embed(image, weight, bias, norm_weight, norm_bias, kernel, stride, padding, norm_first, eps)


def embed(
    hidden: Tensor,  # [B, tokens of the stage before, D of the stage before]
    /,
    weight: Tensor,  # [D, kernel * kernel * D of the stage before], padded with zeros
    bias: Tensor,
    norm_weight: Tensor,  # [D], or [D of the stage before] if `norm_first`
    norm_bias: Tensor,
    *,
    grid: tuple[int, int],  # rows and columns of the stage before
    kernel: int,
    stride: int,
    padding: int,
    norm_first: bool,
    eps: float,
) -> Tensor:  # [B, S, D]
    """Returns the tokens of a stage, made of the tokens of the stage before."""
    image = hidden.view(hidden.shape[0], *grid, hidden.shape[-1])
    return _embed(image, weight, bias, norm_weight, norm_bias, kernel, stride, padding, norm_first, eps)


def _embed(
    image: Tensor,  # [B, rows, columns, channels]
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    kernel: int,
    stride: int,
    padding: int,
    norm_first: bool,
    eps: float,
) -> Tensor:
    if norm_first:
        image = F.layer_norm(image, (image.shape[-1],), norm_weight, norm_bias, eps)
    tokens = F.linear(under_kernel(image, kernel, stride, padding, weight.shape[1]), weight, bias)
    if norm_first:
        return tokens
    return F.layer_norm(tokens, (tokens.shape[-1],), norm_weight, norm_bias, eps)


def under_kernel(image: Tensor, kernel: int, stride: int, padding: int, width: int) -> Tensor:
    """Returns the numbers under a convolution's kernel at each of its places: [B, places, ``width``].

    ``image`` [B, rows, columns, channels] is padded with zeros. The numbers at a place are kernel * kernel *
    channels, followed by zeros up to ``width``.
    """
    padded = F.pad(image, (0, 0, padding, padding, padding, padding))
    seen = padded.unfold(1, kernel, stride).unfold(2, kernel, stride)  # [B, down, across, channels, kernel, kernel]
    seen = seen.permute(0, 1, 2, 4, 5, 3).reshape(image.shape[0], seen.shape[1] * seen.shape[2], -1)
    return F.pad(seen, (0, width - seen.shape[-1]))


def with_depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns ``x`` [B, rows, columns, D] plus its depthwise 3×3 convolution, which keeps the size.

    ``weight`` is [3, 3, D], ``bias`` [D]. Sums are in fp32, the result has the dtype of ``x``.
    """
    rows, columns = x.shape[1:3]
    padded, taps = F.pad(x.float(), (0, 0, 1, 1, 1, 1)), weight.float()
    total = x + bias.float()
    for down in range(3):
        for across in range(3):
            seen = padded[:, down : down + rows, across : across + columns]
            total = torch.addcmul(total, seen, taps[down, across])
    return total.to(x.dtype)


def stored(x: Tensor) -> Tensor:
    """Returns ``x``, and makes the compiler write it to memory. Otherwise the compiler would compute parts of
    ``x`` again in each kernel that reads it."""
    return x.as_strided(x.shape, x.stride())


def convolved(
    hidden: Tensor,  # [B, S, D]
    added: Tensor | None,  # [B, S, D], added to `hidden` first
    weight: Tensor,  # [3, 3, D]
    bias: Tensor,  # [D]
    norm_weight: Tensor,  # [D]
    norm_bias: Tensor,
    grid: tuple[int, int],
    eps: float,
) -> tuple[Tensor, Tensor]:  # both [B, S, D]
    """Returns the sum plus its depthwise convolution, and the layer norm of this result."""
    image = (hidden if added is None else hidden + added).view(-1, *grid, hidden.shape[-1])
    total = stored(with_depthwise(image, weight, bias)).view(hidden.shape)
    return total, F.layer_norm(total, (hidden.shape[-1],), norm_weight, norm_bias, eps)


def window_attention(
    normed: Tensor,  # [B, S, D]
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    grid: tuple[int, int],
    window: int,
    num_heads: int,
) -> Tensor:  # [B, S, D]
    """Computes attention in which the tokens of a square of ``window`` by ``window`` attend to each other.

    A square that reaches over the image's edge is filled with zeros, which are attended to like tokens.
    """
    batch, _, width = normed.shape
    rows, columns = grid
    image = normed.view(batch, rows, columns, width)
    below, right = -rows % window, -columns % window
    if below or right:
        image = F.pad(image, (0, 0, 0, right, 0, below))
    down, across = (rows + below) // window, (columns + right) // window
    squares = image.view(batch, down, window, across, window, width).permute(0, 1, 3, 2, 4, 5)
    squares = squares.reshape(batch * down * across, window * window, width)
    heads = split_heads(linear(squares, qkv_weight, qkv_bias), num_heads)
    attended = join_heads(F.scaled_dot_product_attention(*heads))
    attended = attended.reshape(batch, down, across, window, window, width).permute(0, 1, 3, 2, 4, 5)
    attended = attended.reshape(batch, rows + below, columns + right, width)
    return attended[:, :rows, :columns].reshape(normed.shape)


def channel_attention(
    normed: Tensor,  # [B, S, D]
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    groups: int,
) -> Tensor:  # [B, S, D]
    """Computes attention in which the channels of a group attend to each other; each channel is a vector over all
    tokens.

    The softmax is in fp32. Plain matrix products are used because no attention kernel takes heads as wide as S.
    The scores are few, one for each pair of channels of a group.
    """
    query, key, value = split_heads(linear(normed, qkv_weight, qkv_bias), groups)
    scores = torch.matmul(key.mT, query * normed.shape[1] ** -0.5)  # a column for each query
    attended = torch.matmul(value, scores.float().softmax(dim=-2).to(value.dtype))
    return join_heads(attended)


class Parts(NamedTuple):
    """The functions of a block that a device may replace by others with the same parameters."""

    convolved: Callable[..., tuple[Tensor, Tensor]] = convolved
    windows: Callable[..., Tensor] = window_attention
    channels: Callable[..., Tensor] = channel_attention
    activated: Activated = activated


def _half(
    hidden: Tensor,  # [B, S, D]
    added: Tensor | None,  # [B, S, D], added to `hidden` first
    convolved: Callable[..., tuple[Tensor, Tensor]],
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    activated: Activated,
    act: Activation,
    /,
    conv1_weight: Tensor,  # [3, 3, D]
    conv1_bias: Tensor,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes attention and MLP of one half. Returns tokens, and the tensor that is still to be added to them."""
    hidden, normed = convolved(hidden, added, conv1_weight, conv1_bias, norm1_weight, norm1_bias)
    added = linear(attention(normed, qkv_weight, qkv_bias), out_weight, out_bias)
    hidden, normed = convolved(hidden, added, conv2_weight, conv2_bias, norm2_weight, norm2_bias)
    return hidden, linear(activated(normed, fc1_weight, fc1_bias, act), fc2_weight, fc2_bias)


@takes_weights_of(_half, "spatial", "channel")
def block(
    hidden: Tensor,  # [B, S, D]
    *weights: Tensor,
    grid: tuple[int, int],
    window: int,
    num_heads: int,
    groups: int,
    eps: float,
    act: Activation,
    parts: Parts = Parts(),  # noqa: B008 - all fields are functions
) -> Tensor:  # [B, S, D]
    """Computes attention of tokens inside windows, an MLP, attention of channels, and an MLP."""
    windows = partial(parts.windows, grid=grid, window=window, num_heads=num_heads)
    channels = partial(parts.channels, groups=groups)
    norm = partial(parts.convolved, grid=grid, eps=eps)
    added: Tensor | None = None
    halves = weights[: len(weights) // 2], weights[len(weights) // 2 :]
    for attention, half in zip((windows, channels), halves, strict=True):
        hidden, added = _half(hidden, added, norm, attention, parts.activated, act, *half)
    return hidden if added is None else hidden + added


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the encoder's regions, two for each stage."""
    vision = cast(DavitConfig, config.vision)
    act, eps = activation(vision.activation), vision.layer_norm_eps
    functions: dict[str, RegionFunction] = {}
    grid: tuple[int, int] | None = None
    for number, stage in enumerate(vision.stages, 1):
        before, blocks = stage_regions(number)
        functions[before] = partial(
            embed_pixels if grid is None else partial(embed, grid=grid),
            kernel=stage.kernel,
            stride=stage.stride,
            padding=stage.padding,
            norm_first=stage.norm_first,
            eps=eps,
        )
        grid = stage.grid
        functions[blocks] = partial(
            block,
            grid=grid,
            window=vision.window,
            num_heads=stage.num_heads,
            groups=stage.groups,
            eps=eps,
            act=act,
        )
    return functions


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the encoder's regions."""
    sets: dict[str, list[NamedWeights]] = {}
    for index, stage in enumerate(cast(DavitConfig, config.vision).stages):
        before, blocks = stage_regions(index + 1)
        name = f"encoder.stage.{index}"
        sets[before] = [{**({} if sets else take.statistics()), **_embedding(take, stage, name)}]
        sets[blocks] = [_block(take, stage, f"{name}.layer.{layer}") for layer in range(stage.num_layers)]
    return sets


def _embedding(take: WeightSource, stage: DavitStage, name: str) -> NamedWeights:
    """Returns an embedding's weights, one row for each feature: by place under the kernel, then channel, then
    zeros up to an aligned end."""
    weight = take.raw(f"{name}.conv.weight", stage.hidden_size, stage.input_size, stage.kernel, stage.kernel)
    weight = weight.permute(0, 2, 3, 1).flatten(1)
    weight = F.pad(weight, (0, -weight.shape[1] % _ALIGNED))
    normed = stage.input_size if stage.norm_first else stage.hidden_size
    return {
        "weight": take.place(weight),
        "bias": take(f"{name}.conv.bias", stage.hidden_size),
        **take.affine("norm", f"{name}.norm", normed),
    }


def _block(take: WeightSource, stage: DavitStage, name: str) -> NamedWeights:
    return {
        f"{part}_{ours}": weight
        for part in ("spatial", "channel")
        for ours, weight in _of_half(take, stage, f"{name}.{part}").items()
    }


def _of_half(take: WeightSource, stage: DavitStage, name: str) -> NamedWeights:
    width, inner = stage.hidden_size, stage.inner_size
    return {
        **_depthwise(take, "conv1", f"{name}.conv1", width),
        **take.affine("norm1", f"{name}.norm1", width),
        **take.affine("qkv", f"{name}.qkv", 3 * width, width),
        **take.affine("out", f"{name}.out", width, width),
        **_depthwise(take, "conv2", f"{name}.conv2", width),
        **take.affine("norm2", f"{name}.norm2", width),
        **take.affine("fc1", f"{name}.fc1", inner, width),
        **take.affine("fc2", f"{name}.fc2", width, inner),
    }


def _depthwise(take: WeightSource, ours: str, name: str, width: int) -> NamedWeights:
    """Returns a depthwise convolution's weights with channels last, as tokens have them."""
    weight = take.raw(f"{name}.weight", width, 1, 3, 3).squeeze(1).permute(1, 2, 0)
    return {f"{ours}_weight": take.place(weight), f"{ours}_bias": take(f"{name}.bias", width)}
