"""Computes encoders' blocks and the last regions of an encode on CUDA in 16 bits, with `regions.kernels`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions import vit
from snapcap.models.regions.florence2 import bart, davit
from snapcap.models.regions.fused.activations import kernel_activation
from snapcap.models.regions.layers.activations import Activation
from snapcap.models.regions.prefix import git
from snapcap.models.regions.state import cross_kv as plain


def davit_pixels(
    pixels: Tensor,
    rescale: Tensor,
    mean: Tensor,
    std: Tensor,
    weight: Tensor,
    *others: Tensor,
    kernel: int,
    norm_first: bool,
    **keywords: Any,
) -> Tensor:
    from snapcap.models.regions.kernels.pixels import embed_pixels, fits_pixels  # noqa: PLC0415  Triton

    inputs = (pixels, rescale, mean, std, weight, *others)
    if norm_first or not fits_pixels(weight.shape[0], kernel):
        return davit.embed_pixels(*inputs, kernel=kernel, norm_first=norm_first, **keywords)
    tokens: Tensor = embed_pixels(*inputs, kernel=kernel, **keywords)
    return tokens


def davit_block(*inputs: Tensor, act: Activation, **keywords: Any) -> Tensor:
    parts = davit.Parts(_davit_convolved, _davit_windows, _davit_channels, activated(act))
    return davit.block(*inputs, act=act, **keywords, parts=parts)


def _davit_convolved(
    hidden: Tensor, added: Tensor | None, *weights: Tensor, grid: tuple[int, int], eps: float
) -> tuple[Tensor, Tensor]:
    from snapcap.models.regions.kernels.convolution import convolve_and_norm  # noqa: PLC0415  Triton

    both: tuple[Tensor, Tensor] = convolve_and_norm(hidden, added, *weights, *grid, eps)
    return both


def _davit_windows(
    normed: Tensor, weight: Tensor, bias: Tensor, *, grid: tuple[int, int], window: int, num_heads: int
) -> Tensor:
    from snapcap.models.regions.kernels.windows import attend_windows, fits_windows  # noqa: PLC0415  Triton

    if not fits_windows(grid, window, normed.shape[-1] // num_heads):
        return davit.window_attention(normed, weight, bias, grid, window, num_heads)
    attended: Tensor = attend_windows(F.linear(normed, weight, bias), *grid, window, num_heads)
    return attended


def _davit_channels(normed: Tensor, weight: Tensor, bias: Tensor, *, groups: int) -> Tensor:
    from snapcap.models.regions.kernels.channels import attend_channels, fits_channels  # noqa: PLC0415  Triton

    if not fits_channels(normed.shape[-1] // groups):
        return davit.channel_attention(normed, weight, bias, groups)
    attended: Tensor = attend_channels(F.linear(normed, weight, bias), groups)
    return attended


def bart_block(*inputs: Tensor, act: Activation, **keywords: Any) -> Tensor:
    return bart.block(*inputs, act=act, **keywords, attend=_bart_attention, activated=activated(act))


def _bart_attention(qkv: Tensor, text: Tensor, num_heads: int) -> Tensor:
    from snapcap.models.regions.kernels.padded_attention import attend_padded, fits_heads  # noqa: PLC0415  Triton

    if not fits_heads(qkv.shape[-1] // (3 * num_heads)):
        return bart.attend(qkv, text, num_heads)
    attended: Tensor = attend_padded(qkv, text, num_heads)
    return attended


def activated(act: Activation) -> vit.Activated:
    return _gelu_of_linear if kernel_activation(act) in ("gelu", "gelu_tanh") else vit.activated


def _gelu_of_linear(x: Tensor, weight: Tensor, bias: Tensor, _act: Activation) -> Tensor:
    """Computes a linear layer with GELU as the product's epilogue, which saves writing and reading the widest
    tensor.

    The epilogue is the tanh approximation of GELU. Its error of at most 5e-4 is half the error of rounding to 16
    bits near 1.
    """
    rows = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return rows.view(*x.shape[:-1], -1)


def cross_kv(
    hidden: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor, *weights: Tensor, eps: float | None
) -> Tensor:
    from snapcap.models.regions.kernels.cross_kv import cross_kv as write  # noqa: PLC0415  Triton

    return plain.cross_kv(hidden, slots, key_cache, value_cache, *weights, eps=eps, write=write)


def git_prefix_end(
    hidden: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor, *weights: Tensor
) -> Tensor:
    from snapcap.models.regions.kernels.cross_kv import cross_kv as write  # noqa: PLC0415  Triton

    return git.prefix_end(hidden, slots, key_cache, value_cache, *weights, write=write)
