"""Computes regions on CUDA in 16 bits in fewer and larger launches, with `models.kernels`, and chooses them.

Each function has the parameters and the result of a plain function in `layers.gpt2`, `bert`, `bart`, `davit`,
`git`, `llama` or `vit`, and a build compares the two. Eager serving, the CPU and fp32 use the plain functions, with
one exception: beam search on CUDA has kernels in fp32 too.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.layers import bart, bert, choice, cross_kv, davit, git, gpt2, llama, vit
from snapcap.models.layers.linear import Activation, activation
from snapcap.models.layers.weights import RegionFunction, weight_names

DTYPES = (torch.bfloat16, torch.float16)
_GPT2_BLOCK, _BERT_BLOCK, _GIT_BLOCK, _LLAMA_BLOCK = (
    tuple(weight_names(each.block)) for each in (gpt2, bert, git, llama)
)


def kernel_activation(act: Activation) -> str | None:
    """Returns the name of an activation in `kernels.launch`, or None if the kernels lack it."""
    names = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
    return {activation(name): ours for name, ours in names.items()}.get(act)


def gpt2_block(
    hidden: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cross_key: Tensor,
    cross_value: Tensor,
    *weights: Tensor,  # the weights of `gpt2.block`
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:
    from snapcap.models.kernels.attention import attend_cached, attend_cross  # noqa: PLC0415  Triton
    from snapcap.models.kernels.linear import linear  # noqa: PLC0415  Triton

    w = dict(zip(_GPT2_BLOCK, weights, strict=True))

    def layer(
        x: Tensor, name: str, norm: str | None = None, residual: Tensor | None = None, act: str = ""
    ) -> Tensor:
        gamma, beta = (w[f"{norm}_weight"], w[f"{norm}_bias"]) if norm else (None, None)
        y: Tensor = linear(x, w[f"{name}_weight"], w[f"{name}_bias"], gamma, beta, residual, eps, act)
        return y

    attended = attend_cached(layer(hidden, "qkv", "norm1"), positions, key_cache, value_cache, scale)
    hidden = layer(attended, "out", residual=hidden)
    attended = attend_cross(layer(hidden, "cross_q", "norm_cross"), cross_key, cross_value, None, scale)
    hidden = layer(attended, "cross_out", residual=hidden)
    inner = layer(hidden, "fc1", "norm2", act=kernel_activation(act) or "")
    return layer(inner, "fc2", residual=hidden)


def gpt2_head(
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
    from snapcap.models.kernels.head import head  # noqa: PLC0415  Triton

    logits: Tensor = head(hidden, tokens, positions, forced, head_weight, None, norm_weight, norm_bias, eps)
    return logits


def _bert_layers(weights: Mapping[str, Tensor], eps: float) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns the linear layers and the norms of a block of BERT's kind, which take a tensor and a layer's name."""
    from snapcap.models.kernels.linear import linear, norm  # noqa: PLC0415  Triton

    def layer(x: Tensor, name: str, residual: Tensor | None = None, act: str = "") -> Tensor:
        weight, bias = weights[f"{name}_weight"], weights[f"{name}_bias"]
        y: Tensor = linear(x, weight.t(), bias, None, None, residual, eps, act)
        return y

    def normed(x: Tensor, name: str) -> Tensor:
        y: Tensor = norm(x, weights[f"{name}_weight"], weights[f"{name}_bias"], eps)
        return y

    return layer, normed


def bert_block(
    hidden: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cross_key: Tensor,
    cross_value: Tensor,
    *weights: Tensor,  # the weights of `bert.block`
    num_heads: int,
    eps: float,
    scale: float,
    act: Activation,
    text: Tensor | None = None,
) -> Tensor:
    from snapcap.models.kernels.attention import attend_cached, attend_cross  # noqa: PLC0415  Triton

    layer, normed = _bert_layers(dict(zip(_BERT_BLOCK, weights, strict=True)), eps)
    attended = attend_cached(layer(hidden, "qkv"), positions, key_cache, value_cache, scale)
    hidden = normed(layer(attended, "out", hidden), "norm1")
    attended = attend_cross(layer(hidden, "cross_q"), cross_key, cross_value, text, scale)
    hidden = normed(layer(attended, "cross_out", hidden), "norm_cross")
    inner = layer(hidden, "fc1", act=kernel_activation(act) or "")
    return normed(layer(inner, "fc2", hidden), "norm2")


def florence2_block(hidden: Tensor, positions: Tensor, text: Tensor, *inputs: Tensor, **keywords: Any) -> Tensor:
    return bert_block(hidden, positions, *inputs, **keywords, text=text)


def git_block(
    hidden: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    image_key: Tensor,
    image_value: Tensor,
    *weights: Tensor,  # the weights of `git.block`
    num_heads: int,
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:
    from snapcap.models.kernels.attention import attend_prefixed  # noqa: PLC0415  Triton

    layer, normed = _bert_layers(dict(zip(_GIT_BLOCK, weights, strict=True)), eps)
    qkv = layer(hidden, "qkv")
    attended = attend_prefixed(qkv, positions, key_cache, value_cache, image_key, image_value, None, scale)
    hidden = normed(layer(attended, "out", hidden), "norm1")
    inner = layer(hidden, "fc1", act=kernel_activation(act) or "")
    return normed(layer(inner, "fc2", hidden), "norm2")


def llama_block(
    hidden: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    image_key: Tensor,
    image_value: Tensor,
    *weights: Tensor,  # the weights of `llama.block`
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:
    from snapcap.models.kernels.attention import attend_prefixed  # noqa: PLC0415  Triton
    from snapcap.models.kernels.linear import fits_inputs, linear  # noqa: PLC0415  Triton

    caches = (positions, key_cache, value_cache, image_key, image_value)
    w = dict(zip(_LLAMA_BLOCK, weights, strict=True))
    if not fits_inputs(w["down_weight"].shape[1]):
        return llama.block(hidden, *caches, *weights, eps=eps, scale=scale, act=act)

    def layer(x: Tensor, name: str, norm: str = "", residual: Tensor | None = None, gate: str = "") -> Tensor:
        gamma = w[f"{norm}_weight"] if norm else None
        y: Tensor = linear(x, w[f"{name}_weight"].t(), None, gamma, None, residual, eps, gate, bool(gate))
        return y

    attended = attend_prefixed(layer(hidden, "qkv", "norm1"), *caches, w["frequencies"], scale)
    hidden = layer(attended, "out", residual=hidden)
    inner = layer(hidden, "gate_up", "norm2", gate=kernel_activation(act) or "")
    return layer(inner, "down", residual=hidden)


def llama_head(
    hidden: Tensor,
    tokens: Tensor,
    positions: Tensor,
    forced: Tensor,
    norm_weight: Tensor,
    head_weight: Tensor,
    *,
    eps: float,
) -> Tensor:
    from snapcap.models.kernels.head import fits_width, head  # noqa: PLC0415  Triton

    if not fits_width(hidden.shape[1]):
        return llama.head(hidden, tokens, positions, forced, norm_weight, head_weight, eps=eps)
    logits: Tensor = head(hidden, tokens, positions, forced, head_weight, None, norm_weight, None, eps)
    return logits


def bert_head(
    hidden: Tensor,
    tokens: Tensor,
    positions: Tensor,
    forced: Tensor,
    head_weight: Tensor,
    head_bias: Tensor,
    dense_weight: Tensor | None = None,
    dense_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    eps: float,
    act: Activation | None,
) -> Tensor:
    from snapcap.models.kernels.head import head  # noqa: PLC0415  Triton
    from snapcap.models.kernels.linear import linear  # noqa: PLC0415  Triton

    if act is not None and dense_weight is not None:
        hidden = linear(hidden, dense_weight.t(), dense_bias, None, None, None, eps, kernel_activation(act) or "")
    logits: Tensor = head(hidden, tokens, positions, forced, head_weight, head_bias, norm_weight, norm_bias, eps)
    return logits


def select(*inputs: Tensor) -> Tensor:
    from snapcap.models.kernels.beams import select  # noqa: PLC0415  Triton

    parents: Tensor = select(*inputs)
    return parents


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
    from snapcap.models.kernels.davit import embed_pixels, fits_pixels  # noqa: PLC0415  Triton

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
    from snapcap.models.kernels.davit import convolve_and_norm  # noqa: PLC0415  Triton

    both: tuple[Tensor, Tensor] = convolve_and_norm(hidden, added, *weights, *grid, eps)
    return both


def _davit_windows(
    normed: Tensor, weight: Tensor, bias: Tensor, *, grid: tuple[int, int], window: int, num_heads: int
) -> Tensor:
    from snapcap.models.kernels.davit import attend_windows, fits_windows  # noqa: PLC0415  Triton

    if not fits_windows(grid, window, normed.shape[-1] // num_heads):
        return davit.window_attention(normed, weight, bias, grid, window, num_heads)
    attended: Tensor = attend_windows(F.linear(normed, weight, bias), *grid, window, num_heads)
    return attended


def _davit_channels(normed: Tensor, weight: Tensor, bias: Tensor, *, groups: int) -> Tensor:
    from snapcap.models.kernels.davit import attend_channels, fits_channels  # noqa: PLC0415  Triton

    if not fits_channels(normed.shape[-1] // groups):
        return davit.channel_attention(normed, weight, bias, groups)
    attended: Tensor = attend_channels(F.linear(normed, weight, bias), groups)
    return attended


def bart_block(*inputs: Tensor, act: Activation, **keywords: Any) -> Tensor:
    return bart.block(*inputs, act=act, **keywords, attend=_attention_beside_text, activated=activated(act))


def _attention(qkv: Tensor, num_heads: int) -> Tensor:
    return _attention_beside_text(qkv, None, num_heads)


def _attention_beside_text(qkv: Tensor, text: Tensor | None, num_heads: int) -> Tensor:
    from snapcap.models.kernels.attention import attend_padded, fits_heads  # noqa: PLC0415  Triton

    if not fits_heads(qkv.shape[-1] // (3 * num_heads)):
        return vit.attend(qkv, num_heads) if text is None else bart.attend(qkv, text, num_heads)
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


def _write_cross_kv(
    states: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor, weight: Tensor, bias: Tensor
) -> None:
    from snapcap.models.kernels.attention import cross_kv  # noqa: PLC0415  Triton

    layers, _, heads, _, head_dim = value_cache.shape
    last = slice(-layers * 2 * heads * head_dim, None)
    cross_kv(states, slots, key_cache, value_cache, weight[last], bias[last])


def compiled_function(function: RegionFunction, device: torch.device, dtype: torch.dtype) -> RegionFunction:
    """Returns the function to compile for a region: the region's own, or one of fewer and larger kernels if there
    is one."""
    if device.type == "cuda" and function is choice.select:
        return select  # for any dtype, because scores are fp32
    if device.type != "cuda" or dtype not in DTYPES:
        return function
    plain = function.func if isinstance(function, partial) else function
    keywords: Mapping[str, Any] = function.keywords if isinstance(function, partial) else {}
    act = keywords.get("act")
    if plain in _ENCODING and act is not None:
        # Large products stay with the vendor's libraries, which are faster at them than Triton.
        return partial(plain, **keywords, activated=activated(act), attend=_attention)
    if plain in _WRITING:
        return partial(plain, **keywords, write=_write_cross_kv)
    other = _FUSED.get(plain)
    if other is None or (act is not None and kernel_activation(act) is None):
        return function
    return partial(other, **keywords)


_FUSED: Mapping[Callable[..., Tensor], Callable[..., Tensor]] = {
    gpt2.block: gpt2_block,
    gpt2.head: gpt2_head,
    bert.block: bert_block,
    bart.block: bart_block,
    bart.decoder_block: florence2_block,
    git.block: git_block,
    llama.block: llama_block,
    llama.head: llama_head,
    bert.head: bert_head,
    davit.block: davit_block,
    davit.embed_pixels: davit_pixels,
}
# Plain functions that take the functions of their attention and of their MLP's first layer as parameters.
_ENCODING = (git.prefix_block, vit.block)
# Plain functions that take the function which writes K/V as a parameter.
_WRITING = (cross_kv.cross_kv, cross_kv.projected_cross_kv, git.prefix_end)
