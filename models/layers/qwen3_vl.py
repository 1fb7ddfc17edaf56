"""Computes and loads Qwen3's layers (Yang et al., 2025) behind Qwen3-VL's projector (Bai et al., 2025).

The layers are Llama's, and the caches are written as `layers.llama` writes them, with these differences. Queries
and keys of each head have a norm. The image's tokens in the prefix are padded to the bucket's number; those
behind the picture's own are hidden from all other tokens, in the prefix and in each step. A token has three
positions: an image's token has the prefix's length before it, plus its row and its column; text goes on behind
the larger of both. Features that the encoder tapped are added to the image's tokens after the first layers
(DeepStack, Meng et al., 2024).

The template may put earlier messages before the prefix. Their tokens are a row's own tokens nevertheless: those
behind the start token, as many as the slot's third number in ``grids`` says. An encode reads all of them, and gives
them the first positions. All other tokens see them, and they see only each other. Steps come later, and see all.

B is the padded batch, b the rows of a step, n the tokens before the image, T the bucket's tokens of an image, M
the largest bucket's, P the tokens of a text, S = n + T + P, L the cache length, D the hidden size, E the
encoder's width, d the head dimension, I the inner size. H heads of keys and values serve r * H heads of queries.
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import Qwen3VlConfig
from snapcap.models.layers import llama
from snapcap.models.layers.attention import attend_prefixed
from snapcap.models.layers.linear import Activation, activation
from snapcap.models.layers.qwen3_vision import MERGED, angles, merged, projector_weights
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource


def project(
    hidden: Tensor,  # [B, 4 * T, E]
    slots: Tensor,  # [B] int64
    texts: Tensor,  # [slots + 1, P] int64
    /,
    norm_weight: Tensor,  # [E]
    norm_bias: Tensor,
    fc1_weight: Tensor,  # [4 * E, 4 * E]
    fc1_bias: Tensor,
    fc2_weight: Tensor,  # [D, 4 * E]
    fc2_bias: Tensor,
    token_weight: Tensor,  # [V, D]
    prefix: Tensor | None = None,  # the prefix of `llama.between`
    *,
    eps: float,
) -> Tensor:  # [B, S, D]
    """Projects each token's four patches, and puts the tokens between prefix and text."""
    normed = F.layer_norm(hidden, (hidden.shape[-1],), norm_weight, norm_bias, eps)
    joined = normed.view(hidden.shape[0], -1, norm_weight.shape[0] * MERGED)
    image = merged(joined, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    return llama.between(image, slots, texts, token_weight, prefix)


def add_features(
    hidden: Tensor,  # [B, S, D]
    slots: Tensor,  # [B] int64
    features: Tensor,  # [slots + 1, M, D], of this layer
    /,
    *,
    before: int,
    tokens: int,
) -> Tensor:  # [B, S, D]
    """Adds the tapped features to the image's tokens."""
    added = features[slots.unsqueeze(1), torch.arange(tokens, device=hidden.device)]
    return hidden + F.pad(added, (0, 0, before, hidden.shape[1] - before - tokens))


def prefix_block(
    hidden: Tensor,  # [B, S, D]
    slots: Tensor,  # [B] int64
    image_key: Tensor,  # [1, slots + 1, H, d, n + M] of this layer, written in place
    image_value: Tensor,  # [1, slots + 1, H, n + M, d], likewise
    own_key: Tensor,  # [1, slots + 1, H, d, L], likewise
    own_value: Tensor,  # [1, slots + 1, H, L, d], likewise
    grids: Tensor,  # [slots + 1, 3] int64
    /,
    norm1_weight: Tensor,  # [D]
    qkv_weight: Tensor,  # [(r + 2) * H * d, D]
    q_norm_weight: Tensor,  # [d]
    k_norm_weight: Tensor,  # [d]
    frequencies: Tensor,  # [3, d / 2] fp32, as `angles` takes them
    out_weight: Tensor,  # [D, r * H * d]
    norm2_weight: Tensor,
    gate_up_weight: Tensor,  # [2 * I, D]
    down_weight: Tensor,  # [D, I]
    *,
    before: int,
    tokens: int,
    eps: float,
    act: Activation,
) -> Tensor:  # [B, S, D]
    """Computes one layer over prefix and text, and writes their keys and values into the rows' slots."""
    length, grid = hidden.shape[1], grids[slots]
    turned = angles(prefix_places(grid, before, tokens, length), frequencies)
    norms = (q_norm_weight, k_norm_weight)
    query, key, value = llama.heads_of(hidden, norm1_weight, qkv_weight, image_value, turned, eps, *norms)
    caches, seen = (image_key, image_value, own_key, own_value), _seen(grid, before, tokens, length)
    attended = llama.attend_and_keep(query, key, value, slots, *caches, before + tokens, seen)
    return llama.after_attention(hidden, attended, out_weight, norm2_weight, gate_up_weight, down_weight, eps, act)


def prefix_end(
    hidden: Tensor,  # [B, S, D]
    slots: Tensor,  # [B] int64
    image_key: Tensor,  # the last layer's caches, shaped as in `prefix_block`
    image_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    grids: Tensor,  # [slots + 1, 3] int64
    /,
    norm1_weight: Tensor,  # [D]
    qkv_weight: Tensor,  # [(r + 2) * H * d, D]
    k_norm_weight: Tensor,  # [d]
    frequencies: Tensor,  # [3, d / 2] fp32
    *,
    before: int,
    tokens: int,
    eps: float,
) -> Tensor:  # [B, S, D], the input of the last layer
    """Writes the keys and values of the last layer into the rows' slots."""
    turned = angles(prefix_places(grids[slots], before, tokens, hidden.shape[1]), frequencies)
    key, value = llama.last_heads_of(hidden, norm1_weight, qkv_weight, image_value, turned, eps, k_norm_weight)
    llama.keep(key, value, slots, image_key, image_value, own_key, own_value, before + tokens)
    return hidden.clone()  # a region must not return its input


def prefix_places(
    grid: Tensor,  # [B, 3] int64
    before: int,
    tokens: int,
    length: int,
) -> Tensor:  # [B, S, 3] int64
    """Returns the three positions of each token of prefix, image and text."""
    shape, ahead = grid[:, :2].clamp(min=1), grid[:, 2:]
    place = torch.arange(length, device=grid.device)
    own = place - before - tokens
    # Tokens that earlier messages move: the prefix, the image, and the start token. Later ones count those anyway.
    start = before + ahead
    text = torch.where(own < 0, place + ahead, own + before + shape.amax(1, keepdim=True))
    text = torch.where(own == 0, text + ahead, text)
    text = torch.where((own > 0) & (own <= ahead), own - 1, text)
    columns = shape[:, 1:]
    row, column = (place - before) // columns + start, (place - before) % columns + start
    image = torch.stack((start.expand_as(row), row, column), dim=-1)
    is_image = (place >= before) & (own < 0)
    return torch.where(is_image.unsqueeze(-1), image, text.unsqueeze(-1))


def _seen(grid: Tensor, before: int, tokens: int, length: int) -> Tensor:
    """Returns [B, 1, S, S] bool: a token sees the tokens up to itself and those of earlier messages, but no padding
    behind the image's tokens."""
    place = torch.arange(length, device=grid.device)
    own, ahead = place - before - tokens, grid[:, 2:]
    order = torch.where((own > 0) & (own <= ahead), own - 1, place + ahead)
    padding = (place >= before + grid[:, :2].clamp(min=1).prod(1, keepdim=True)) & (own < 0)
    return ((order.unsqueeze(1) <= order.unsqueeze(2)) & ~padding.unsqueeze(1)).unsqueeze(1)


def block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    grid: Tensor,  # [b, 3] int64
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    image_key: Tensor,  # [b, H, d, n + M]
    image_value: Tensor,  # [b, H, n + M, d]
    /,
    norm1_weight: Tensor,  # [D]
    qkv_weight: Tensor,  # [(r + 2) * H * d, D]
    q_norm_weight: Tensor,  # [d]
    k_norm_weight: Tensor,  # [d]
    frequencies: Tensor,  # [3, d / 2] fp32
    out_weight: Tensor,  # [D, r * H * d]
    norm2_weight: Tensor,
    gate_up_weight: Tensor,  # [2 * I, D]
    down_weight: Tensor,  # [D, I]
    *,
    before: int,
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:  # [b, D]
    """Computes one layer for one new token a row, which attends to its picture's tokens and to the row's own."""
    grid = grid[:, :2].clamp(min=1)
    # A text's three positions are the same.
    turned = angles((positions + before + grid.amax(1)).unsqueeze(-1), frequencies.sum(0, keepdim=True))
    norms = (q_norm_weight, k_norm_weight)
    query, key, value = llama.heads_of(hidden, norm1_weight, qkv_weight, image_value, turned, eps, *norms)
    place = torch.arange(image_value.shape[2], device=hidden.device)
    unseen = place >= before + grid.prod(1, keepdim=True)
    caches = (key_cache, value_cache, image_key, image_value)
    attended = attend_prefixed(query, key, value, positions, *caches, scale, unseen[:, None, None])
    return llama.after_attention(hidden, attended, out_weight, norm2_weight, gate_up_weight, down_weight, eps, act)


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the decoder's regions, for the largest number of tokens that ``config`` has."""
    decoder = config.decoder
    act, eps = activation(decoder.activation), decoder.layer_norm_eps
    before, tokens = len(config.prefix), config.vision.image_tokens
    scale = decoder.head_dim**-0.5
    return {
        **llama.regions(config),
        "prefix_before": partial(project, eps=config.vision.layer_norm_eps),
        "prefix_block": partial(prefix_block, before=before, tokens=tokens, eps=eps, act=act),
        "prefix_tap": partial(add_features, before=before, tokens=tokens),
        "prefix_after": partial(prefix_end, before=before, tokens=tokens, eps=eps),
        "decoder_block": partial(block, before=before, eps=eps, scale=scale, act=act),
    }


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the decoder's regions."""
    vision, decoder = config.vision, cast(Qwen3VlConfig, config.decoder)
    projection = {
        **take.affine("norm", "projection.norm", vision.hidden_size),
        **projector_weights(take, "projection", MERGED * vision.hidden_size, decoder.hidden_size),
    }
    turns = take.place(_frequencies(decoder), torch.float32)
    norms = [
        {f"{part}_norm_weight": take(f"decoder.layer.{layer}.{part}_norm", decoder.head_dim) for part in ("q", "k")}
        for layer in range(decoder.num_layers)
    ]
    taken = llama.weights(take, config, projection, turns, norms, prefix_end)
    return {**taken, "prefix_tap": [{} for _ in vision.taps]}


def _frequencies(decoder: Qwen3VlConfig) -> Tensor:
    """Returns rotary frequencies [3, d / 2]: each frequency stands in the row of the axis with which it turns.

    The axes take turns. Behind the last frequency of its section, an axis leaves its place to time.
    """
    turns = llama.frequencies(decoder.rope, decoder.head_dim)
    number = torch.arange(len(turns))
    axis = torch.where(number < 3 * torch.tensor(decoder.sections)[number % 3], number % 3, 0)
    return torch.where(torch.arange(3).unsqueeze(1) == axis, turns, 0.0)
