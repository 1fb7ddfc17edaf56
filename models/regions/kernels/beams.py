"""Computes a step of beam search in four launches.

Two launches find each row's best tokens. The third computes each row's part of its group's choice. The fourth
writes the choice, and moves the K/V of rows that go on from another row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.regions.kernels.best_tokens import NOTHING, best_tokens, place_of, score_of
from snapcap.models.regions.kernels.group_choice import continuation_of, continuations, ranks_of
from snapcap.models.regions.kernels.launch import launch


@triton_op(
    "snapcap::select",
    mutates_args={"tokens", "key_cache", "value_cache", "scores", "finished", "sequences", "outcomes"},
)
def select(
    logits: Tensor,  # [b, V] fp32
    normalised: Tensor,  # [1] bool
    tokens: Tensor,  # [b] int64, replaced in beams
    positions: Tensor,  # [b] int64
    forced: Tensor,  # [b, L] int64
    ends: Tensor,  # [V] bool
    key_cache: Tensor,  # [N, slots or one more, H, d, L], each key contiguous; rows' prefixes are replaced
    value_cache: Tensor,  # [N, slots or one more, H, L, d], likewise
    members: Tensor,  # [b, M] int64
    inside: Tensor,  # [b, M] bool
    ranks: Tensor,  # [b, 2] int64
    lasts: Tensor,  # [b] int64
    divisors: Tensor,  # [b, 2, L] fp32
    limits: Tensor,  # [b] fp32
    scores: Tensor,  # [b] fp32, replaced
    finished: Tensor,  # [b] fp32, replaced
    sequences: Tensor,  # [2, slots, L + 1] int64, the first b slots are replaced
    outcomes: Tensor,  # [b, L + 1] int64, replaced
) -> Tensor:  # [b] int64
    """Computes `models.regions.choice.beam_search.select`. All rows of a group must hold the same members."""
    rows, vocabulary = logits.shape
    layers, _, heads, length, width = value_cache.shape
    beams, slots = min(members.shape[1], rows), sequences.shape[1]
    padded_length = triton.next_power_of_2(length + 1)
    each = min(2 * beams, vocabulary)
    values, ids = best_tokens(logits, normalised, each)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    parents, chosen, lengths = empty(rows), empty(rows), empty(rows)
    totals, kept = empty(rows, dtype=torch.float32), empty(rows, dtype=torch.float32)
    rewritten = empty(2, rows, length + 1)
    launch(_choose)[(rows,)](
        values,
        ids,
        tokens,
        positions,
        forced,
        ends,
        members,
        inside,
        ranks,
        lasts,
        divisors,
        limits,
        scores,
        finished,
        sequences,
        parents,
        chosen,
        lengths,
        totals,
        kept,
        rewritten,
        rows,
        slots,
        length,
        STRIDE=members.shape[1],
        BEAMS=beams,
        EACH=each,
        PLACES=triton.next_power_of_2(beams),
        PADDED=triton.next_power_of_2(each),
        LENGTH=padded_length,
        num_warps=1,
    )
    launch(_write)[(rows, 1 + 2 * layers * heads)](
        parents,
        chosen,
        lengths,
        totals,
        kept,
        rewritten,
        positions,
        tokens,
        scores,
        finished,
        sequences,
        outcomes,
        key_cache,
        value_cache,
        rows,
        slots,
        length,
        heads,
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        WIDTH=width,
        LENGTH=padded_length,
        WHOLE=length * width,
        BLOCK=2048,
        num_warps=4,
    )
    return parents


@triton.jit
def _choose(
    values,
    ids,
    tokens,
    positions,
    forced,
    ends,
    members,
    inside,
    ranks,
    lasts,
    divisors,
    limits,
    scores,
    finished,
    sequences,
    parents,
    chosen,
    lengths,
    totals,
    kept,
    rewritten,
    rows,
    slots,
    length,
    STRIDE: tl.constexpr,
    BEAMS: tl.constexpr,
    EACH: tl.constexpr,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Computes the choice of a row's whole group, as `models.regions.choice.beam_search` does, and stores the
    row's part."""
    row = tl.program_id(0)
    at = tl.load(positions + row)
    rank, lowest = tl.load(ranks + row * 2), tl.load(ranks + row * 2 + 1)
    rank, lowest = tl.minimum(rank, BEAMS - 1), tl.minimum(lowest, BEAMS - 1)
    members += row * STRIDE
    inside += row * STRIDE
    active = (tl.load(forced + row * length + at) < 0) & (tl.load(inside) != 0)
    last = at >= tl.load(lasts + row)

    place = tl.arange(0, PLACES)
    running, best = continuations(values, ids, ends, scores, members, inside, rows, BEAMS, EACH, PLACES, PADDED)
    within = tl.load(inside + place, mask=place < BEAMS, other=0) != 0
    member = tl.minimum(tl.load(members + place, mask=place < BEAMS, other=0), rows - 1)
    number = continuation_of(place_of(running) // PADDED, within, place, rank, BEAMS)
    mine = tl.max(tl.where(place == number, running, NOTHING), 0)
    source = place_of(mine)
    parent = tl.minimum(tl.load(members + source // PADDED), rows - 1)
    following = tl.load(ids + parent * EACH + source % PADDED)
    following = tl.where(active, following, tl.load(tokens + row))
    parent = tl.where(active, parent, row)
    tl.store(parents + row, parent)
    tl.store(chosen + row, following)
    tl.store(totals + row, tl.where(active, score_of(mine), tl.load(scores + row)))

    # A continuation that ends is a hypothesis if it is among the group's best; the best hypotheses are kept.
    some = place < BEAMS
    source = place_of(best)
    origin = tl.minimum(tl.load(members + source // PADDED, mask=some, other=0), rows - 1)
    end = tl.load(ids + origin * EACH + source % PADDED, mask=some, other=0)
    fresh = ((tl.load(ends + end, mask=some, other=0) != 0) | last) & within & active
    divisor, later = tl.load(divisors + row * 2 * length + at), tl.load(divisors + (row * 2 + 1) * length + at)
    new = tl.where(fresh, tl.div_rn(score_of(best), divisor), float("-inf"))
    old = tl.where(within, tl.load(finished + member, mask=some, other=0.0), float("-inf"))
    old_rank, new_rank = ranks_of(old, new, place)
    is_new = tl.sum((new_rank == rank).to(tl.int32), 0) > 0
    worst = tl.sum(tl.where(old_rank == lowest, old, 0.0) + tl.where(new_rank == lowest, new, 0.0), 0)
    value = tl.sum(tl.where(old_rank == rank, old, 0.0) + tl.where(new_rank == rank, new, 0.0), 0)
    tl.store(kept + row, value)
    chosen_new = place == tl.sum(tl.where(new_rank == rank, place, 0), 0)
    from_new, end = tl.sum(tl.where(chosen_new, origin, 0), 0), tl.sum(tl.where(chosen_new, end, 0), 0)
    held = tl.where(is_new, from_new, tl.sum(tl.where(old_rank == rank, member, 0), 0))

    t = tl.arange(0, LENGTH)
    inner = t <= length
    tail = tl.load(sequences + parent * (length + 1) + t, mask=inner, other=0)
    tl.store(rewritten + row * (length + 1) + t, tl.where(t == at, following, tail), mask=inner)
    half = tl.where(is_new, 0, slots)
    # An older hypothesis is shorter, so the token written at this position lies behind its end.
    tail = tl.load(sequences + (half + held) * (length + 1) + t, mask=inner, other=0)
    tail = tl.where(t == at, end, tl.where(is_new & (t == length), at + 1, tail))
    tl.store(rewritten + (rows + row) * (length + 1) + t, tail, mask=inner)

    furthest = tl.div_rn(score_of(tl.max(running, 0)), later)
    over = (furthest <= worst) | (worst > tl.load(limits + row)) | last
    tl.store(lengths + row, tl.where(over & active & (rank == 0), tl.sum(tl.where(t == length, tail, 0), 0), 0))


@triton.jit
def _write(
    parents,
    chosen,
    lengths,
    totals,
    kept,
    rewritten,
    positions,
    tokens,
    scores,
    finished,
    sequences,
    outcomes,
    key_cache,
    value_cache,
    rows,
    slots,
    length,
    heads,
    key_layer,
    key_slot,
    key_head,
    value_layer,
    value_slot,
    value_head,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the choice of a row, or copies K/V to it, depending on the program.

    A row's first program writes the choice. Each other program copies the keys or values of a head, if the row
    goes on from another row. No program writes K/V that another reads, because a row whose K/V are copied
    elsewhere is never overwritten.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1) - 1
    parent = tl.load(parents + row)
    if piece < 0:
        tl.store(tokens + row, tl.load(chosen + row))
        tl.store(scores + row, tl.load(totals + row))
        tl.store(finished + row, tl.load(kept + row))
        t = tl.arange(0, LENGTH)
        inner = t <= length
        tail = tl.load(rewritten + row * (length + 1) + t, mask=inner, other=0)
        tl.store(sequences + row * (length + 1) + t, tail, mask=inner)
        tail = tl.load(rewritten + (rows + row) * (length + 1) + t, mask=inner, other=0)
        tl.store(sequences + (slots + row) * (length + 1) + t, tail, mask=inner)
        tl.store(outcomes + row * (length + 1) + t, tl.where(t == length, tl.load(lengths + row), tail), mask=inner)
    elif parent != row:
        cached = tl.load(positions + row) * WIDTH
        layer, head = (piece // (2 * heads)).to(tl.int64), ((piece // 2) % heads).to(tl.int64)
        if piece % 2 == 0:
            at = layer * key_layer + head * key_head
            _copy(key_cache + at + parent * key_slot, key_cache + at + row * key_slot, cached, WHOLE, BLOCK)
        else:
            at = layer * value_layer + head * value_head
            _copy(value_cache + at + parent * value_slot, value_cache + at + row * value_slot, cached, WHOLE, BLOCK)


@triton.jit
def _copy(source, target, count, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, WHOLE, BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(target + n, tl.load(source + n, mask=n < count, other=0.0), mask=n < count)
