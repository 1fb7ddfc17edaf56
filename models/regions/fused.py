"""Regions for CUDA in 16 bits, made of `regions.kernels`: what is compiled there instead of the plain functions.

Each takes and returns what the function of its name in `regions.gpt2`, `bert`, `florence2`, `prefix.git` or `vit`
does, and a build compares it with that. Llama's layers have none: Inductor compiles the plain functions. Eager
serving, the CPU and fp32 keep the plain functions, but for beams in fp32.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.regions import bert, gpt2, vit
from snapcap.models.regions.choice import beam_search
from snapcap.models.regions.florence2 import bart, davit
from snapcap.models.regions.functions import RegionFunction
from snapcap.models.regions.layers.activations import Activation, activation
from snapcap.models.regions.prefix import git
from snapcap.models.regions.state import cross_kv
from snapcap.models.regions.table import Region
from snapcap.models.regions.weight_names import BERT_BLOCK, GIT_BLOCK, GPT2_BLOCK

DTYPES = (torch.bfloat16, torch.float16)


def compiled_function(region: Region, device: torch.device, dtype: torch.dtype) -> RegionFunction:
    """What to compile for a region: its own function, or one of fewer and fatter kernels where there is one."""
    function = region.function
    if device.type == "cuda" and function is beam_search.select:
        return _select  # in any dtype: scores are fp32
    if device.type != "cuda" or dtype not in DTYPES:
        return function
    plain = function.func if isinstance(function, partial) else function
    keywords: Mapping[str, Any] = function.keywords if isinstance(function, partial) else {}
    act = keywords.get("act")
    if plain in _ACTIVATED and act is not None:
        # Large products and attention stay with the vendor's libraries, which are faster at them than Triton.
        return partial(plain, **keywords, activated=_activated(act))
    other = _FUSED.get(plain)
    if other is None or (act is not None and _act_name(act) is None):
        return function
    return partial(other, **keywords)


def _act_name(act: Activation) -> str | None:
    """The kernels' name of an activation, if they have it."""
    known = {activation("gelu"): "gelu", activation("gelu_new"): "gelu_tanh", activation("relu"): "relu"}
    return known.get(act)


def _gpt2_block(
    hidden: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cross_key: Tensor,
    cross_value: Tensor,
    *weights: Tensor,  # GPT2_BLOCK
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:
    from snapcap.models.regions.kernels.attention import attend_cached, attend_cross  # noqa: PLC0415  Triton
    from snapcap.models.regions.kernels.linear import linear  # noqa: PLC0415  Triton

    w = dict(zip(GPT2_BLOCK, weights, strict=True))

    def layer(
        x: Tensor, name: str, norm: str | None = None, residual: Tensor | None = None, act: str = ""
    ) -> Tensor:
        gamma, beta = (w[f"{norm}.weight"], w[f"{norm}.bias"]) if norm else (None, None)
        y: Tensor = linear(x, w[f"{name}.weight"], w[f"{name}.bias"], gamma, beta, residual, eps, act)
        return y

    attended = attend_cached(layer(hidden, "qkv", "norm1"), positions, key_cache, value_cache, scale)
    hidden = layer(attended, "out", residual=hidden)
    attended = attend_cross(layer(hidden, "cross_q", "norm_cross"), cross_key, cross_value, None, scale)
    hidden = layer(attended, "cross_out", residual=hidden)
    inner = layer(hidden, "fc1", "norm2", act=_act_name(act) or "")
    return layer(inner, "fc2", residual=hidden)


def _gpt2_head(
    hidden: Tensor,
    tokens: Tensor,
    positions: Tensor,
    forced: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    head_weight: Tensor,
    *,
    eps: float,
) -> Tensor:
    from snapcap.models.regions.kernels.head import head  # noqa: PLC0415  Triton

    logits: Tensor = head(hidden, tokens, positions, forced, head_weight, None, norm_weight, norm_bias, eps)
    return logits


def _bert_block(
    hidden: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cross_key: Tensor,
    cross_value: Tensor,
    *weights: Tensor,  # BERT_BLOCK
    num_heads: int,
    eps: float,
    scale: float,
    act: Activation,
    text: Tensor | None = None,
) -> Tensor:
    from snapcap.models.regions.kernels.attention import attend_cached, attend_cross  # noqa: PLC0415  Triton
    from snapcap.models.regions.kernels.linear import linear, norm  # noqa: PLC0415  Triton

    w = dict(zip(BERT_BLOCK, weights, strict=True))

    def layer(x: Tensor, name: str, residual: Tensor | None = None, act: str = "") -> Tensor:
        y: Tensor = linear(x, w[f"{name}.weight"].t(), w[f"{name}.bias"], None, None, residual, eps, act)
        return y

    def normed(x: Tensor, name: str) -> Tensor:
        y: Tensor = norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps)
        return y

    attended = attend_cached(layer(hidden, "qkv"), positions, key_cache, value_cache, scale)
    hidden = normed(layer(attended, "out", hidden), "norm1")
    attended = attend_cross(layer(hidden, "cross_q"), cross_key, cross_value, text, scale)
    hidden = normed(layer(attended, "cross_out", hidden), "norm_cross")
    inner = layer(hidden, "fc1", act=_act_name(act) or "")
    return normed(layer(inner, "fc2", hidden), "norm2")


def _florence2_block(hidden: Tensor, positions: Tensor, text: Tensor, *inputs: Tensor, **keywords: Any) -> Tensor:
    return _bert_block(hidden, positions, *inputs, **keywords, text=text)


def _git_block(
    hidden: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    image_key: Tensor,
    image_value: Tensor,
    *weights: Tensor,  # GIT_BLOCK
    num_heads: int,
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:
    from snapcap.models.regions.kernels.attention import attend_prefixed  # noqa: PLC0415  Triton
    from snapcap.models.regions.kernels.linear import linear, norm  # noqa: PLC0415  Triton

    w = dict(zip(GIT_BLOCK, weights, strict=True))

    def layer(x: Tensor, name: str, residual: Tensor | None = None, act: str = "") -> Tensor:
        y: Tensor = linear(x, w[f"{name}.weight"].t(), w[f"{name}.bias"], None, None, residual, eps, act)
        return y

    def normed(x: Tensor, name: str) -> Tensor:
        y: Tensor = norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps)
        return y

    qkv = layer(hidden, "qkv")
    attended = attend_prefixed(qkv, positions, key_cache, value_cache, image_key, image_value, scale)
    hidden = normed(layer(attended, "out", hidden), "norm1")
    inner = layer(hidden, "fc1", act=_act_name(act) or "")
    return normed(layer(inner, "fc2", hidden), "norm2")


def _bert_head(
    hidden: Tensor,
    tokens: Tensor,
    positions: Tensor,
    forced: Tensor,
    *weights: Tensor,
    eps: float,
    act: Activation | None,
) -> Tensor:
    from snapcap.models.regions.kernels.head import head  # noqa: PLC0415  Triton
    from snapcap.models.regions.kernels.linear import linear  # noqa: PLC0415  Triton

    *transform, head_weight, head_bias = weights
    gamma = beta = None
    if act is not None:
        dense_weight, dense_bias, gamma, beta = transform
        hidden = linear(hidden, dense_weight.t(), dense_bias, None, None, None, eps, _act_name(act) or "")
    logits: Tensor = head(hidden, tokens, positions, forced, head_weight, head_bias, gamma, beta, eps)
    return logits


def _davit_block(*inputs: Tensor, act: Activation, **keywords: Any) -> Tensor:
    parts = davit.Parts(_davit_convolved, _davit_windows, _activated(act))
    return davit.block(*inputs, act=act, **keywords, parts=parts)


def _davit_convolved(
    hidden: Tensor, added: Tensor | None, *weights: Tensor, grid: tuple[int, int], eps: float
) -> tuple[Tensor, Tensor]:
    from snapcap.models.regions.kernels.davit import convolve_and_norm  # noqa: PLC0415  Triton

    both: tuple[Tensor, Tensor] = convolve_and_norm(hidden, added, *weights, *grid, eps)
    return both


def _davit_windows(
    normed: Tensor, weight: Tensor, bias: Tensor, *, grid: tuple[int, int], window: int, num_heads: int
) -> Tensor:
    from snapcap.models.regions.kernels.davit import attend_windows, fits_windows  # noqa: PLC0415  Triton

    if not fits_windows(grid, window, normed.shape[-1] // num_heads):
        return davit.window_attention(normed, weight, bias, grid, window, num_heads)
    attended: Tensor = attend_windows(F.linear(normed, weight, bias), *grid, window, num_heads)
    return attended


def _activated(act: Activation) -> vit.Activated:
    return _gelu_of_linear if _act_name(act) in ("gelu", "gelu_tanh") else vit.activated


def _gelu_of_linear(x: Tensor, weight: Tensor, bias: Tensor, _act: Activation) -> Tensor:
    """The activation as the product's epilogue, which saves reading and writing the widest tensor there is.

    It is the tanh approximation, at most 5e-4 from the exact one: half of what rounding to 16 bits does near 1.
    """
    rows = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return rows.view(*x.shape[:-1], -1)


def _cross_kv(
    hidden: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor, *weights: Tensor, eps: float | None
) -> Tensor:
    from snapcap.models.regions.kernels.cross_kv import cross_kv as write  # noqa: PLC0415  Triton

    return cross_kv.cross_kv(hidden, slots, key_cache, value_cache, *weights, eps=eps, write=write)


def _git_prefix_end(
    hidden: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor, *weights: Tensor
) -> Tensor:
    from snapcap.models.regions.kernels.cross_kv import cross_kv as write  # noqa: PLC0415  Triton

    return git.prefix_end(hidden, slots, key_cache, value_cache, *weights, write=write)


def _select(*inputs: Tensor) -> Tensor:
    from snapcap.models.regions.kernels.beams import select  # noqa: PLC0415  Triton

    parents: Tensor = select(*inputs)
    return parents


_FUSED: Mapping[Callable[..., Tensor], Callable[..., Tensor]] = {
    gpt2.block: _gpt2_block,
    gpt2.head: _gpt2_head,
    cross_kv.cross_kv: _cross_kv,
    bert.block: _bert_block,
    bart.decoder_block: _florence2_block,
    git.block: _git_block,
    git.prefix_end: _git_prefix_end,
    bert.head: _bert_head,
    davit.block: _davit_block,
}
# Those that take what their first layer of an MLP is computed by.
_ACTIVATED = (bart.block, git.prefix_block, vit.block)
