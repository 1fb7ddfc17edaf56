"""Computes attention of all tokens to all tokens except padding, on the strided output of the q/k/v product."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.regions.kernels.launch import launch

_QUERIES, _KEYS = 128, 64  # queries of a program, and keys that it reads at once
_WARPS, _STAGES = 4, 3
_MOST_WIDTH = 128


def fits_heads(width: int) -> bool:
    """Returns whether there is a kernel for heads of ``width`` features. Tensor cores need a power of two, at
    least 16."""
    return 16 <= width <= _MOST_WIDTH and width & (width - 1) == 0


@triton_op("snapcap::attend_padded", mutates_args=())
def attend_padded(
    qkv: Tensor,  # [B, T, 3 * H * d]
    text: Tensor,  # [B, P] int64: the last P of the tokens, -1 behind the end of each text
    heads: int,
) -> Tensor:  # [B, T, H * d]
    """Computes softmax(q K / √d) V over all tokens except padding, with a running softmax (Milakov and Gimelshein,
    2018)."""
    batch, length, outputs = qkv.shape
    width, count = outputs // (3 * heads), text.shape[1]
    out = torch.empty(batch, length, heads * width, dtype=qkv.dtype, device=qkv.device)
    launch(_attend_padded)[(triton.cdiv(length, _QUERIES), heads, batch)](
        qkv,
        text,
        out,
        LENGTH=length,
        TEXT=count,
        TEXT_PADDED=triton.next_power_of_2(count),
        HEADS=heads,
        WIDTH=width,
        QUERIES=_QUERIES,
        KEYS=_KEYS,
        # The hardware computes exp2 and not exp, so log2(e) is multiplied into the scale.
        SCALE=width**-0.5 * 1.4426950408889634,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out


@triton.jit
def _attend_padded(
    qkv,
    text,
    out,
    LENGTH: tl.constexpr,
    TEXT: tl.constexpr,
    TEXT_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
):
    head, image = tl.program_id(1), tl.program_id(2)
    t = tl.arange(0, TEXT_PADDED)
    said = tl.load(text + image * TEXT + t, mask=t < TEXT, other=-1) >= 0
    seen = LENGTH - TEXT + tl.sum(said.to(tl.int32), 0)
    row: tl.constexpr = 3 * HEADS * WIDTH
    d = tl.arange(0, WIDTH)
    token = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    first = qkv + image.to(tl.int64) * (LENGTH * row) + head * WIDTH + d[None, :]
    query = tl.load(first + token[:, None] * row, mask=(token < LENGTH)[:, None], other=0.0)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, LENGTH, KEYS):
        j = start + tl.arange(0, KEYS)
        at = first + HEADS * WIDTH + j[:, None] * row
        there = (j < LENGTH)[:, None]
        key = tl.load(at, mask=there, other=0.0)
        value = tl.load(at + HEADS * WIDTH, mask=there, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * SCALE
        score = tl.where((j < seen)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        shrink, p = tl.exp2(top - higher), tl.exp2(score - higher[:, None])
        top, total = higher, total * shrink + tl.sum(p, 1)
        mixed = tl.dot(p.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    to = out + (image.to(tl.int64) * LENGTH + token[:, None]) * (HEADS * WIDTH) + head * WIDTH + d[None, :]
    tl.store(to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=(token < LENGTH)[:, None])
