"""Computes DaViT (Ding et al., 2022), Florence-2's encoder: stages of blocks, each of other widths and tokens.

A block attends twice: tokens to tokens inside windows, then channels to channels over the whole image. Before each
attention and each MLP stands a depthwise convolution, which tells where a token is.

B is the padded batch, S = rows · columns the tokens of the stage, D its hidden size. Linear layers are stored
[out, in], what embeds a stage as well: over the tokens under its kernel, row by row.

No convolution is the library's: cuDNN's first ones take a GPU three seconds, most of a compiled start, and want
channels where tokens have them last. As sums and products they fuse with the norms and additions around them.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions.layers.activations import Activation
from snapcap.models.regions.vit import Activated, activated

# Weights of a half of a block: those of `_half` in its order.
_HALF = 16


def embed_pixels(
    pixels: Tensor,  # [B, height, width, 3] uint8
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    weight: Tensor,  # [D, kernel * kernel * 3 and zeros]
    bias: Tensor,  # [D]
    norm_weight: Tensor,  # [D], or [3] where the norm goes first
    norm_bias: Tensor,
    *,
    kernel: int,
    stride: int,
    padding: int,
    norm_first: bool,
    eps: float,
) -> Tensor:  # [B, S, D]
    """Normalise the image in fp32, and embed it as the first stage's tokens."""
    image = ((pixels.float() * rescale - mean) / std).to(weight.dtype)
    return _embed(image, weight, bias, norm_weight, norm_bias, kernel, stride, padding, norm_first, eps)


def embed(
    hidden: Tensor,  # [B, tokens of the stage before, its D]
    weight: Tensor,  # [D, kernel * kernel * its D and zeros]
    bias: Tensor,
    norm_weight: Tensor,  # [D], or [its D] where the norm goes first
    norm_bias: Tensor,
    *,
    grid: tuple[int, int],  # rows and columns of the stage before
    kernel: int,
    stride: int,
    padding: int,
    norm_first: bool,
    eps: float,
) -> Tensor:  # [B, S, D]
    """The tokens of a stage from those of the stage before."""
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
    """What a convolution's kernel sees at each of its places, of an image [B, rows, columns, channels] between
    zeros: [B, places, ``width``], with zeros behind kernel * kernel * channels."""
    padded = F.pad(image, (0, 0, padding, padding, padding, padding))
    seen = padded.unfold(1, kernel, stride).unfold(2, kernel, stride)  # [B, down, across, channels, kernel, kernel]
    seen = seen.permute(0, 1, 2, 4, 5, 3).reshape(image.shape[0], seen.shape[1] * seen.shape[2], -1)
    return F.pad(seen, (0, width - seen.shape[-1]))


def with_depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x`` [B, rows, columns, D] and its 3×3 convolution of each channel alone, which keeps the size.

    ``weight`` [3, 3, D], ``bias`` [D]. Sums are in fp32.
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
    """The same, as the compiler writes it to memory: else it computes a part of it again in all that read it."""
    return x.as_strided(x.shape, x.stride())


def convolved(
    hidden: Tensor,  # [B, S, D]
    added: Tensor | None,  # [B, S, D], added first
    weight: Tensor,  # [3, 3, D]
    bias: Tensor,  # [D]
    norm_weight: Tensor,  # [D]
    norm_bias: Tensor,
    grid: tuple[int, int],
    eps: float,
) -> tuple[Tensor, Tensor]:  # both [B, S, D]
    """The sum with its depthwise convolution, and the norm of that."""
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
    """Tokens of a square of ``window`` by ``window`` attend to each other. Squares that reach over the edge are
    filled with zeros there, which are seen as tokens are."""
    batch, _, width = normed.shape
    rows, columns = grid
    image = normed.view(batch, rows, columns, width)
    below, right = -rows % window, -columns % window
    if below or right:
        image = F.pad(image, (0, 0, 0, right, 0, below))
    down, across = (rows + below) // window, (columns + right) // window
    squares = image.view(batch, down, window, across, window, width).permute(0, 1, 3, 2, 4, 5)
    squares = squares.reshape(batch * down * across, window * window, width)
    qkv = F.linear(squares, qkv_weight, qkv_bias).view(*squares.shape[:2], 3, num_heads, width // num_heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [squares, H, tokens, d]
    attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    attended = attended.reshape(batch, down, across, window, window, width).permute(0, 1, 3, 2, 4, 5)
    attended = attended.reshape(batch, rows + below, columns + right, width)
    return attended[:, :rows, :columns].reshape(normed.shape)


def channel_attention(
    normed: Tensor,  # [B, S, D]
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    groups: int,
) -> Tensor:  # [B, S, D]
    """Channels of a group attend to each other, each as what it says of all tokens; the softmax in fp32.

    Scores are few, one for a pair of channels, and sums over all tokens: no attention kernel takes heads so wide.
    """
    batch, length, width = normed.shape
    qkv = F.linear(normed, qkv_weight, qkv_bias).view(batch, length, 3, groups, width // groups)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, groups, S, D / groups]
    scores = torch.matmul(key.mT, query * length**-0.5)  # of a query by column
    attended = torch.matmul(value, scores.float().softmax(dim=-2).to(value.dtype))
    return attended.transpose(1, 2).reshape(batch, length, width)


class Parts(NamedTuple):
    """What of a block may be computed otherwise on a device, by functions that take the same."""

    convolved: Callable[..., tuple[Tensor, Tensor]] = convolved
    windows: Callable[..., Tensor] = window_attention
    channels: Callable[..., Tensor] = channel_attention
    activated: Activated = activated


def block(
    hidden: Tensor,  # [B, S, D]
    *weights: Tensor,  # of both halves, each as `_half` takes them
    grid: tuple[int, int],
    window: int,
    num_heads: int,
    groups: int,
    eps: float,
    act: Activation,
    parts: Parts = Parts(),  # noqa: B008  it holds nothing but functions
) -> Tensor:  # [B, S, D]
    """Attention of tokens inside windows, then of channels, each with an MLP behind it."""
    windows = partial(parts.windows, grid=grid, window=window, num_heads=num_heads)
    channels = partial(parts.channels, groups=groups)
    norm = partial(parts.convolved, grid=grid, eps=eps)
    added: Tensor | None = None
    for attention, half in ((windows, weights[:_HALF]), (channels, weights[_HALF:])):
        hidden, added = _half(hidden, added, norm, attention, parts.activated, act, *half)
    return hidden if added is None else hidden + added


def _half(
    hidden: Tensor,  # [B, S, D]
    added: Tensor | None,  # [B, S, D], of which and ``hidden`` the sum is taken
    convolved: Callable[..., tuple[Tensor, Tensor]],
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    activated: Activated,
    act: Activation,
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
    """What the next half takes: tokens, and what is added to them."""
    hidden, normed = convolved(hidden, added, conv1_weight, conv1_bias, norm1_weight, norm1_bias)
    added = F.linear(attention(normed, qkv_weight, qkv_bias), out_weight, out_bias)
    hidden, normed = convolved(hidden, added, conv2_weight, conv2_bias, norm2_weight, norm2_bias)
    return hidden, F.linear(activated(normed, fc1_weight, fc1_bias, act), fc2_weight, fc2_bias)
