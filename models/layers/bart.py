"""Computes Florence-2's prefix: BART's encoder (Lewis et al., 2019) over the tokens of the image and of a text.

Every text is padded with -1 to the greatest length, and no token attends to padding. So texts of all lengths go
through one bucket, and padding does not change a caption.

B is the padded batch, N the number of image tokens, P the greatest number of text tokens, T = N + P. The other
letters are those of ``models.layers.gpt2``. Linear layers are stored [out, in].
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import DavitConfig, Florence2Config
from snapcap.models.layers import bert, cross_kv
from snapcap.models.layers.attention import join_heads, split_heads
from snapcap.models.layers.linear import Activation, activation, linear
from snapcap.models.layers.vit import Activated, activated
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource, takes_weights_of


def embed(
    hidden: Tensor,  # [B, N - 1, encoder D]
    slots: Tensor,  # [B] int64
    texts: Tensor,  # [slots + 1, P] int64
    /,
    image_position: Tensor,  # [N - 1, encoder D]
    projection_weight: Tensor,  # [D, encoder D]
    projection_norm_weight: Tensor,  # [D]
    projection_norm_bias: Tensor,
    token_weight: Tensor,  # [V, D]
    position_weight: Tensor,  # [T, D]
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    scale: float,
    projection_eps: float,
    eps: float,
) -> Tensor:  # [B, T, D]
    """Returns the encoder's input: the mean of the image's tokens, the image's tokens, and the text's tokens.

    Positions are added to the image's tokens, which are then projected and normalised. The text's tokens are
    embedded. Positions are added to all tokens, followed by a norm.
    """
    placed = hidden + image_position
    image = torch.cat((placed.mean(dim=1, keepdim=True), placed), dim=1)
    image = linear(image, projection_weight)
    image = F.layer_norm(image, (image.shape[-1],), projection_norm_weight, projection_norm_bias, projection_eps)
    text = F.embedding(texts[slots].clamp(min=0), token_weight) * scale
    tokens = torch.cat((image, text), dim=1) + position_weight
    return F.layer_norm(tokens, (tokens.shape[-1],), norm_weight, norm_bias, eps)


def attend(
    qkv: Tensor,  # [B, T, 3 * D]
    text: Tensor,  # [B, P] int64
    num_heads: int,
) -> Tensor:  # [B, T, D]
    """Returns softmax(q K / √d) V, in which each token sees all tokens except padding."""
    seen = ~padding(text, qkv.shape[1])[:, None, None]
    return join_heads(F.scaled_dot_product_attention(*split_heads(qkv, num_heads), attn_mask=seen))


def block(
    hidden: Tensor,  # [B, T, D]
    slots: Tensor,  # [B] int64
    texts: Tensor,  # [slots + 1, P] int64
    /,
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    *,
    num_heads: int,
    eps: float,
    act: Activation,
    attend: Callable[[Tensor, Tensor, int], Tensor] = attend,
    activated: Activated = activated,
) -> Tensor:  # [B, T, D]
    """Computes one post-norm encoder layer, in which each token sees all tokens except padding."""
    width = hidden.shape[-1]
    attended = attend(linear(hidden, qkv_weight, qkv_bias), texts[slots], num_heads)
    hidden = hidden + linear(attended, out_weight, out_bias)
    hidden = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    hidden = hidden + linear(activated(hidden, fc1_weight, fc1_bias, act), fc2_weight, fc2_bias)
    return F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)


@takes_weights_of(bert.block)
def decoder_block(
    hidden: Tensor,  # [b, D]
    positions: Tensor,  # [b] int64, below L
    text: Tensor,  # [b, P] int64
    key_cache: Tensor,  # [b, H, d, L], written in place at each row's position
    value_cache: Tensor,  # [b, H, L, d], likewise
    cross_key: Tensor,  # [b, H, d, T]
    cross_value: Tensor,  # [b, H, T, d]
    *weights: Tensor,
    num_heads: int,
    eps: float,
    scale: float,
    act: Activation,
) -> Tensor:  # [b, D]
    """Computes ``bert.block``, with a cross-attention that ignores padding."""
    unseen = padding(text, cross_key.shape[3])[:, None, None]
    inputs = (hidden, positions, key_cache, value_cache, cross_key, cross_value, *weights)
    return bert.block(*inputs, num_heads=num_heads, eps=eps, scale=scale, act=act, unseen=unseen)


def padding(text: Tensor, length: int) -> Tensor:
    """Returns [b, T] bool, true for each encoder token that is padding. The texts [b, P] are the last P of the T
    tokens."""
    image = torch.zeros(text.shape[0], length - text.shape[1], dtype=torch.bool, device=text.device)
    return torch.cat((image, text < 0), dim=1)


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the decoder's regions, and of those over the tokens of the image and of a text."""
    decoder, vision = cast(Florence2Config, config.decoder), config.vision
    act, eps = activation(decoder.activation), decoder.layer_norm_eps
    before = partial(embed, scale=decoder.embedding_scale, projection_eps=vision.layer_norm_eps, eps=eps)
    return {
        "prefix_before": before,
        "prefix_block": partial(block, num_heads=decoder.encoder_heads, eps=eps, act=act),
        "encoder_after": partial(cross_kv.cross_kv, eps=eps),
        **bert.steps(config, decoder_block),
    }


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of these regions. A checkpoint may hold an embedding of its own for encoder and
    decoder."""
    decoder = cast(Florence2Config, config.decoder)
    width, inner = decoder.hidden_size, decoder.encoder_inner_size
    sets = bert.weights_of_steps(take, decoder)
    kv = bert.weights_of_cross_kv(take, decoder, config.cross_size)
    (embedding,) = sets["decoder_before"]
    token = embedding["token_weight"]
    before = _before(take, config, decoder, take.copy("text_encoder.token", token))
    layers = range(decoder.encoder_layers)
    blocks = [bert.weights_of_layer(take, f"text_encoder.layer.{layer}", width, inner) for layer in layers]
    own = {**embedding, "token_weight": take.copy("decoder.own_token", token)}
    return {
        "prefix_before": [before],
        "prefix_block": blocks,
        "encoder_after": [kv],
        **sets,
        "decoder_before": [own],
    }


def _before(take: WeightSource, config: ModelConfig, decoder: Florence2Config, token: Tensor) -> NamedWeights:
    vision, width = cast(DavitConfig, config.vision), decoder.hidden_size
    first = decoder.position_offset
    position = take.raw("text_encoder.position", decoder.n_positions + first, width)
    return {
        "image_position": take.place(_image_position(take, vision)),
        "projection_weight": _projection(take, width, vision.hidden_size),
        **take.affine("projection_norm", "projection_norm", width),
        "token_weight": token,
        "position_weight": take.place(position[first : first + config.prefix_length]),
        **take.affine("norm", "text_encoder.embed_norm", width),
    }


def _image_position(take: WeightSource, vision: DavitConfig) -> Tensor:
    """Returns the positions [tokens, D] of the last stage's tokens.

    A position is the embeddings of the token's column and row, side by side, plus the temporal embedding of a
    video's first image: sine and cosine of 0 in turn.
    """
    (rows, columns), width = vision.grid, vision.hidden_size
    half = width // 2
    row = take.raw("projection.row", vision.position_rows, half)[:rows]
    column = take.raw("projection.column", vision.position_rows, width - half)[:columns]
    by_column = column.unsqueeze(0).expand(rows, -1, -1)
    by_row = row.unsqueeze(1).expand(-1, columns, -1)
    first = torch.arange(width, device=row.device) % 2
    return torch.cat((by_column, by_row), dim=-1).flatten(0, 1).float() + first


def _projection(take: WeightSource, width: int, inputs: int) -> Tensor:
    """Returns the projection as [out, in]. Older files hold its transpose, under another name."""
    if take.has("projection.transposed"):
        return take.place(take.raw("projection.transposed", inputs, width).t())
    return take("projection.weight", width, inputs)
