"""Computes an image's first tokens from its pixels: normalisation, convolution and layer norm."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.regions.kernels.launch import launch

_TILE, _WARPS = 128, 8  # tokens of a program; warps
_CHANNELS = 4  # three and one of zeros, so that one load reads a row under the kernel
# Greatest width whose sums, and greatest kernel whose weights, fit in a program.
_MOST_WIDTH, _MOST_KERNEL = 256, 16


def fits_pixels(width: int, kernel: int) -> bool:
    """Returns whether the kernel here can compute tokens of ``width`` features with a convolution of side
    ``kernel``."""
    return 16 <= width <= _MOST_WIDTH and 3 <= kernel <= _MOST_KERNEL


@triton_op("snapcap::embed_pixels", mutates_args=())
def embed_pixels(
    pixels: Tensor,  # [B, height, width, 3] uint8
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    weight: Tensor,  # [D, kernel * kernel * 3], padded with zeros
    bias: Tensor,  # [D]
    gamma: Tensor,  # [D]
    beta: Tensor,  # [D]
    kernel: int,
    stride: int,
    padding: int,
    eps: float,
) -> Tensor:  # [B, S, D]
    """Returns the layer norm of a convolution of the normalised image, which is padded with zeros."""
    batch, height, width, channels = pixels.shape
    rows, columns = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
    # Pixels of a row that a program reads; those behind the kernel are multiplied by 0.
    across = triton.next_power_of_2(kernel)
    right = padding + across - kernel
    right += -(padding + width + right) % 8  # aligns the beginning of each row to 16 bytes
    image = ((pixels.float() * rescale - mean) / std).to(weight.dtype)
    image = F.pad(image, (0, _CHANNELS - channels, padding, right, padding, padding)).contiguous()
    features = weight.shape[0]
    out = torch.empty(batch, rows * columns, features, dtype=weight.dtype, device=weight.device)
    launch(_embed_pixels)[(triton.cdiv(rows * columns, _TILE), batch)](
        image,
        weight,
        bias,
        gamma,
        beta,
        out,
        HEIGHT=image.shape[1],
        BREADTH=image.shape[2],
        COLUMNS=columns,
        TOKENS=rows * columns,
        KERNEL=kernel,
        ACROSS=across,
        STRIDE=stride,
        CHANNELS=channels,
        STORED=_CHANNELS,
        INPUTS=weight.shape[1],
        WIDTH=features,
        PADDED=triton.next_power_of_2(features),
        TILE=_TILE,
        EPS=eps,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def _embed_pixels(
    image,
    weight,
    bias,
    gamma,
    beta,
    out,
    HEIGHT: tl.constexpr,
    BREADTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    KERNEL: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STORED: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    EPS: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = (token < TOKENS)[:, None]
    corner = (token // COLUMNS * BREADTH + token % COLUMNS) * (STRIDE * STORED)
    k, d = tl.arange(0, ACROSS * STORED), tl.arange(0, PADDED)
    real = (d < WIDTH)[None, :]
    pixel, channel = k // STORED, k % STORED
    used = ((pixel < KERNEL) & (channel < CHANNELS))[:, None]
    at = image + tl.program_id(1).to(tl.int64) * (HEIGHT * BREADTH * STORED) + corner[:, None] + k[None, :]
    of_weight = weight + d[None, :] * INPUTS + (pixel * CHANNELS + channel)[:, None]
    sums = tl.zeros([TILE, PADDED], tl.float32)
    for row in range(KERNEL):
        x = tl.load(at + row * (BREADTH * STORED), mask=there, other=0.0)
        w = tl.load(of_weight + row * (KERNEL * CHANNELS), mask=used & real, other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    sums += tl.load(bias + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
    centred = tl.where(real, sums - (tl.sum(sums, 1) / WIDTH)[:, None], 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + EPS)[:, None]
    y = y * tl.load(gamma + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
    y += tl.load(beta + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
    to = out + (tl.program_id(1).to(tl.int64) * TOKENS + token)[:, None] * WIDTH + d[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=there & real)
