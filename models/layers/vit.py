"""Computes the ViT encoder (Dosovitskiy et al., 2020, pre-norm) with pure functions of activations and weights.

B is the padded batch, S the encoder tokens (patches and the class token), D the hidden size, H the heads. Weights
come after the inputs, so one compiled block serves every layer.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import ClipConfig, VisionConfig
from snapcap.models.layers.attention import attend_all, join_heads, split_heads
from snapcap.models.layers.linear import Activation, activation, linear
from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource

# Takes x, weight, bias and activation. Returns the activated linear layer.
Activated = Callable[[Tensor, Tensor, Tensor, Activation], Tensor]
# Takes queries, keys and values as one tensor [B, S, 3 * D], and the number of heads. Returns [B, S, D].
Attend = Callable[[Tensor, int], Tensor]


def embed(
    pixels: Tensor,  # [B, height, width, 3] uint8
    /,
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    patch_weight: Tensor,  # [D, 3 * patch height * patch width]
    patch_bias: Tensor,  # [D]
    class_token: Tensor,  # [1, 1, D]
    position: Tensor,  # [1, S, D]
    norm_weight: Tensor | None = None,  # [D], of a norm before the blocks
    norm_bias: Tensor | None = None,
    *,
    grid: tuple[int, int],
    patch_size: tuple[int, int],
    eps: float,
) -> Tensor:  # [B, S, D]
    """Normalises the image in fp32, cuts it into patches and embeds them.

    The embedding is a convolution whose stride is its kernel size. Computed as a matrix product over patches, it
    fuses better.
    """
    patches = cut(pixels, rescale, mean, std, grid, patch_size).to(patch_weight.dtype)
    tokens = F.linear(patches, patch_weight, patch_bias)
    tokens = torch.cat((class_token.expand(tokens.shape[0], -1, -1), tokens), dim=1) + position
    if norm_weight is None:
        return tokens
    return F.layer_norm(tokens, (tokens.shape[-1],), norm_weight, norm_bias, eps)


def cut(
    pixels: Tensor,  # [B, height, width, 3] uint8
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    grid: tuple[int, int],
    patch_size: tuple[int, int],
) -> Tensor:  # [B, patches, 3 * patch height * patch width] fp32
    """Returns the normalised patches of an image."""
    (rows, columns), (height, width) = grid, patch_size
    image = (pixels[:, : rows * height, : columns * width].to(torch.float32) * rescale - mean) / std
    patches = image.reshape(-1, rows, height, columns, width, 3).permute(0, 1, 3, 5, 2, 4)
    return patches.reshape(-1, rows * columns, 3 * height * width)


def activated(
    x: Tensor,  # [B, S, in]
    weight: Tensor,  # [out, in]
    bias: Tensor,  # [out]
    act: Activation,
) -> Tensor:  # [B, S, out]
    """Computes a linear layer and the activation after it."""
    return act(linear(x, weight, bias))


def attend(
    qkv: Tensor,  # [B, S, 3 * D]
    num_heads: int,
) -> Tensor:  # [B, S, D]
    """Returns softmax(q K / √d) V, in which each token sees all tokens."""
    return join_heads(attend_all(*split_heads(qkv, num_heads)))


def _attend_related(qkv: Tensor, num_heads: int, relative: Tensor) -> Tensor:
    """Returns `attend` with a number [1, H, S, S] added to the score of each pair of tokens."""
    return join_heads(F.scaled_dot_product_attention(*split_heads(qkv, num_heads), attn_mask=relative))


def block(
    hidden: Tensor,  # [B, S, D]
    /,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    qkv_weight: Tensor,  # [3 * D, D]
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    relative: Tensor | None = None,  # [1, H, S, S], added to the score of each pair of tokens
    *,
    num_heads: int,
    eps: float,
    act: Activation,
    activated: Activated = activated,
    attend: Attend = attend,
) -> Tensor:  # [B, S, D]
    """Computes one pre-norm transformer layer: attention over all tokens, then the MLP, each added to its input.

    BEiT's layer (Bao et al., 2021) also has a bias for each pair of positions, ``relative``. Its layer scale needs
    no code, because it is multiplied into the weights.
    """
    normed = F.layer_norm(hidden, hidden.shape[-1:], norm1_weight, norm1_bias, eps)
    qkv = linear(normed, qkv_weight, qkv_bias)
    attended = attend(qkv, num_heads) if relative is None else _attend_related(qkv, num_heads, relative)
    weights = (out_weight, out_bias, norm2_weight, norm2_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    return after_attention(hidden, attended, *weights, eps, act, activated)


def after_attention(
    hidden: Tensor,  # [B, S, D], the layer's input
    attended: Tensor,  # [B, S, D]
    out_weight: Tensor,
    out_bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    eps: float,
    act: Activation,
    activated: Activated = activated,
) -> Tensor:  # [B, S, D]
    """Computes the rest of a layer: the projection of the attended values, and the MLP."""
    hidden = hidden + linear(attended, out_weight, out_bias)
    normed = F.layer_norm(hidden, hidden.shape[-1:], norm_weight, norm_bias, eps)
    return hidden + linear(activated(normed, fc1_weight, fc1_bias, act), fc2_weight, fc2_bias)


def regions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the functions of the encoder's regions."""
    vision = config.vision
    act, eps = activation(vision.activation), vision.layer_norm_eps
    return {
        "encoder_before": partial(embed, grid=vision.grid, patch_size=vision.patch_size, eps=eps),
        "encoder_block": partial(block, num_heads=vision.num_heads, eps=eps, act=act),
    }


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the encoder's regions."""
    vision = config.vision
    return {"encoder_before": [weights_before(take, vision)], "encoder_block": weights_of_blocks(take, vision)}


def weights_before(take: WeightSource, vision: VisionConfig) -> NamedWeights:
    """Returns the weights of `embed`."""
    around = _clip_tokens(take, vision) if isinstance(vision, ClipConfig) else _tokens(take, vision)
    return {**weights_of_patches(take, vision), **around}


def weights_of_blocks(take: WeightSource, vision: VisionConfig) -> list[NamedWeights]:
    """Returns the weights of `block` for each layer."""
    return [_block(take, vision, f"encoder.layer.{layer}") for layer in range(vision.num_layers)]


def weights_of_patches(take: WeightSource, vision: VisionConfig) -> NamedWeights:
    """Returns the statistics of pixels, and the patch embedding as a matrix [width, 3 * height * breadth]."""
    width, (height, breadth) = vision.hidden_size, vision.patch_size
    weight = take.raw("encoder.patch.weight", width, 3, height, breadth).reshape(width, 3 * height * breadth)
    return {**take.statistics(), "patch_weight": take.turned(take.place(weight))}


def _tokens(take: WeightSource, vision: VisionConfig) -> NamedWeights:
    """Returns the patches' bias, the tokens before the patches, and positions. DeiT's distillation token is joined
    to the class token."""
    length, width = vision.output_shape
    leading = [take.raw("encoder.class_token", 1, 1, width)]
    if vision.leading_tokens == 2:
        leading.append(take.raw("encoder.distillation_token", 1, 1, width))
    position = take.raw("encoder.position", 1, length, width) if vision.positions else torch.zeros(1, length, width)
    return {
        "patch_bias": take("encoder.patch.bias", width),
        "class_token": take.place(torch.cat(leading, dim=1)),
        "position": take.place(position),
    }


def _clip_tokens(take: WeightSource, vision: ClipConfig) -> NamedWeights:
    """Returns the same for CLIP, and the norm that follows. CLIP's patches have no bias and get zeros."""
    length, width = vision.output_shape
    return {
        "patch_bias": take.place(torch.zeros(width)),
        "class_token": take.place(take.raw("encoder.class_token", width).view(1, 1, width)),
        "position": take.place(take.raw("encoder.position", length, width).view(1, length, width)),
        **take.affine("norm", "encoder.embed_norm", width),
    }


def _block(take: WeightSource, vision: VisionConfig, name: str) -> NamedWeights:
    width, inner = vision.hidden_size, vision.intermediate_size
    return {
        **take.affine("norm1", f"{name}.norm1", width),
        **_qkv(take, vision, name),
        **take.wide("out", f"{name}.out", width, width),
        **take.affine("norm2", f"{name}.norm2", width),
        **take.wide("fc1", f"{name}.fc1", inner, width),
        **take.wide("fc2", f"{name}.fc2", width, inner),
    }


def _qkv(take: WeightSource, vision: VisionConfig, name: str) -> NamedWeights:
    width = vision.hidden_size
    if vision.fused_qkv:
        return take.wide("qkv", f"{name}.qkv", 3 * width, width)
    projections = [f"{name}.{projection}" for projection in ("query", "key", "value")]
    weight = take.turned(take.stacked([f"{projection}.weight" for projection in projections], width, width))
    # Without qkv_bias the region adds zeros, which is exact, so one region serves both cases.
    if not vision.qkv_bias:
        return {"qkv_weight": weight, "qkv_bias": take.place(torch.zeros(3 * width))}
    bias = take.stacked([f"{projection}.bias" for projection in projections], width)
    return {"qkv_weight": weight, "qkv_bias": bias}
