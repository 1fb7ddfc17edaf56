"""Computes attention of an image's channels to each other, on the strided output of the q/k/v product."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.regions.kernels.launch import launch

_CHUNK = 64  # tokens that a program of `_score_channels` reads at once
_TILE = 128  # tokens that a program of `_mix_channels` writes
_PROGRAMS = 1024  # number of programs that keep a device busy; the sum over tokens is split to reach it
_MOST_WIDTH = 128  # greatest width whose scores fit in a program


def fits_channels(width: int) -> bool:
    """Returns whether there are kernels for groups of ``width`` channels. Tensor cores need a power of two, at
    least 16."""
    return 16 <= width <= _MOST_WIDTH and width & (width - 1) == 0


@triton_op("snapcap::attend_channels", mutates_args=())
def attend_channels(
    qkv: Tensor,  # [B, S, 3 * groups * c]
    groups: int,
) -> Tensor:  # [B, S, groups * c]
    """Computes attention in which the channels of a group attend to each other, with sums and softmax in fp32.

    Each channel is a vector over all tokens.
    """
    batch, length, outputs = qkv.shape
    width = outputs // (3 * groups)
    chunks = triton.cdiv(length, _CHUNK)
    each = triton.cdiv(chunks, max(1, _PROGRAMS // (batch * groups)))
    parts = triton.cdiv(chunks, each)
    scores = torch.empty(batch, groups, parts, width, width, dtype=torch.float32, device=qkv.device)
    launch(_score_channels)[(groups, parts, batch)](
        qkv, scores, LENGTH=length, GROUPS=groups, WIDTH=width, CHUNKS=each, CHUNK=_CHUNK, num_warps=4
    )
    # [B, groups, channel of a key, channel of a query]
    weights = (scores.sum(2) * length**-0.5).softmax(dim=-2).to(qkv.dtype)
    out = torch.empty(batch, length, groups * width, dtype=qkv.dtype, device=qkv.device)
    launch(_mix_channels)[(groups, triton.cdiv(length, _TILE), batch)](
        qkv, weights, out, LENGTH=length, GROUPS=groups, WIDTH=width, TILE=_TILE, num_warps=4
    )
    return out


@triton.jit
def _score_channels(
    qkv,
    scores,
    LENGTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group, part, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH, WIDTH], tl.float32)
    for chunk in range(CHUNKS):
        token = (part * CHUNKS + chunk) * CHUNK + tl.arange(0, CHUNK)
        there = (token < LENGTH)[:, None]
        place = (image.to(tl.int64) * LENGTH + token)[:, None]
        at = qkv + place * (3 * GROUPS * WIDTH) + group * WIDTH + c[None, :]
        query = tl.load(at, mask=there, other=0.0)
        key = tl.load(at + GROUPS * WIDTH, mask=there, other=0.0)
        sums = tl.dot(tl.trans(key), query, sums, input_precision="ieee")
    to = scores + ((image * GROUPS + group) * tl.num_programs(1) + part) * (WIDTH * WIDTH)
    tl.store(to + c[:, None] * WIDTH + c[None, :], sums)


@triton.jit
def _mix_channels(
    qkv,
    weights,
    out,
    LENGTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    group, image = tl.program_id(0), tl.program_id(2)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = (token < LENGTH)[:, None]
    place = (image.to(tl.int64) * LENGTH + token)[:, None]
    c = tl.arange(0, WIDTH)
    at = qkv + place * (3 * GROUPS * WIDTH) + (2 * GROUPS + group) * WIDTH + c[None, :]
    of_group = weights + (image * GROUPS + group) * (WIDTH * WIDTH)
    mixed = tl.dot(
        tl.load(at, mask=there, other=0.0),
        tl.load(of_group + c[:, None] * WIDTH + c[None, :]),
        input_precision="ieee",
    )
    to = out + place * (GROUPS * WIDTH) + group * WIDTH + c[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=there)
