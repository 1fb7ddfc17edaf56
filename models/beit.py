"""What BEiT's encoder does otherwise than ViT's (Bao et al., 2021), as a pure function of activations and weights.

Its layer scale is no difference: it is a factor of the weights before it. Letters are those of ``models.vit``.
"""

import torch.nn.functional as F
from torch import Tensor

from models import vit
from models.activations import Activation

BLOCK_WEIGHTS = (*vit.BLOCK_WEIGHTS, "relative")


def block(
    hidden: Tensor,  # [B, S, D]
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
    relative: Tensor,  # [1, H, S, S], added to the score of each pair of tokens
    *,
    num_heads: int,
    eps: float,
    act: Activation,
) -> Tensor:  # [B, S, D]
    """One transformer layer whose attention has a bias for each pair of positions."""
    batch, length, width = hidden.shape
    normed = F.layer_norm(hidden, (width,), norm1_weight, norm1_bias, eps)
    qkv = F.linear(normed, qkv_weight, qkv_bias).view(batch, length, 3, num_heads, width // num_heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, S, D/H]
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=relative)
    attended = attended.transpose(1, 2).reshape(batch, length, width)
    hidden = hidden + F.linear(attended, out_weight, out_bias)
    normed = F.layer_norm(hidden, (width,), norm2_weight, norm2_bias, eps)
    return hidden + F.linear(act(F.linear(normed, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)
