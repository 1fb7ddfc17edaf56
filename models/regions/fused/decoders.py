"""Computes decoders' blocks, heads and the choice of beams on CUDA in 16 bits, with `regions.kernels`."""

from typing import Any

from torch import Tensor

from snapcap.models.regions.fused.activations import kernel_activation
from snapcap.models.regions.layers.activations import Activation
from snapcap.models.regions.weight_names import BERT_BLOCK, GIT_BLOCK, GPT2_BLOCK


def gpt2_block(
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
    from snapcap.models.regions.kernels.head import head  # noqa: PLC0415  Triton

    logits: Tensor = head(hidden, tokens, positions, forced, head_weight, None, norm_weight, norm_bias, eps)
    return logits


def bert_block(
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
    inner = layer(hidden, "fc1", act=kernel_activation(act) or "")
    return normed(layer(inner, "fc2", hidden), "norm2")


def bert_head(
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
        hidden = linear(hidden, dense_weight.t(), dense_bias, None, None, None, eps, kernel_activation(act) or "")
    logits: Tensor = head(hidden, tokens, positions, forced, head_weight, head_bias, gamma, beta, eps)
    return logits


def select(*inputs: Tensor) -> Tensor:
    from snapcap.models.regions.kernels.beams import select  # noqa: PLC0415  Triton

    parents: Tensor = select(*inputs)
    return parents
