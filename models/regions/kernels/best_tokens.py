"""Finds each row's best tokens and their log-probabilities in two launches: in parts, then among the parts' best.

Scores are compared as integers that hold the score's place in the low bits. So no two integers are equal, the
first of equal scores wins, and the largest integer tells its place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapcap.models.regions.kernels.launch import launch

NOTHING = tl.constexpr(-(2**63) + 1)  # below the integer of every score, including -inf
_PART = 1024


def best_tokens(logits: Tensor, normalised: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Returns `models.regions.choice.beam_search.best_log_probs`: [b, each] fp32 and int64."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, _PART)
    best = torch.empty(rows, parts, each, dtype=torch.int64, device=logits.device)
    maxima = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(maxima)
    launch(_of_part)[(rows, parts)](
        logits, best, maxima, sums, parts, VOCABULARY=vocabulary, EACH=each, PART=_PART, num_warps=4
    )
    values = torch.empty(rows, each, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, each, dtype=torch.int64, device=logits.device)
    launch(_of_row)[(rows,)](
        best,
        maxima,
        sums,
        normalised,
        values,
        ids,
        parts,
        EACH=each,
        PARTS=triton.next_power_of_2(parts),
        PADDED=triton.next_power_of_2(parts * each),
        num_warps=4,
    )
    return values, ids


@triton.jit
def keyed(score, place):
    """Returns int64 numbers in the order of the scores. Among equal scores, the first place has the largest
    number."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def score_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place_of(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _of_part(logits, best, maxima, sums, parts, VOCABULARY: tl.constexpr, EACH: tl.constexpr, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = part * PART + tl.arange(0, PART)
    here = n < VOCABULARY
    x = tl.load(logits + row * VOCABULARY + n, mask=here, other=float("-inf"))
    top = tl.max(x, 0)
    tl.store(maxima + row * parts + part, top)
    tl.store(sums + row * parts + part, tl.sum(tl.where(x > float("-inf"), tl.exp(x - top), 0.0), 0))
    keys = tl.where(here, keyed(x, n), NOTHING)
    for i in range(EACH):
        largest = tl.max(keys, 0)
        tl.store(best + (row * parts + part) * EACH + i, largest)
        keys = tl.where(keys == largest, NOTHING, keys)


@triton.jit
def _of_row(
    best,
    maxima,
    sums,
    normalised,
    values,
    ids,
    parts,
    EACH: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    part, n = tl.arange(0, PARTS), tl.arange(0, PADDED)
    tops = tl.load(maxima + row * parts + part, mask=part < parts, other=float("-inf"))
    total = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(tops, 0)
    logarithm = tl.log(tl.sum(tl.where(tops > float("-inf"), total * tl.exp(tops - top), 0.0), 0))
    as_they_are = tl.load(normalised) != 0
    keys = tl.load(best + row * parts * EACH + n, mask=n < parts * EACH, other=NOTHING)
    for i in range(EACH):
        largest = tl.max(keys, 0)
        score = score_of(largest)
        tl.store(values + row * EACH + i, tl.where(as_they_are, score, score - top - logarithm))
        tl.store(ids + row * EACH + i, place_of(largest).to(tl.int64))
        keys = tl.where(keys == largest, NOTHING, keys)
