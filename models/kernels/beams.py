"""Computes a step of beam search in four launches.

Two launches find each row's best tokens and their log-probabilities: in parts, then among the parts' best. The
third computes each row's part of its group's choice. The fourth writes the choice, and moves the K/V of rows that
go on from another row. Scores are compared as integers that hold the score's place in the low bits. So no two
integers are equal, the first of equal scores wins, and the largest integer tells its place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.kernels.launch import launch


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
    """Computes `models.layers.choice.select`. All rows of a group must hold the same members."""
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
    """Computes the choice of a row's whole group, as `models.layers.choice` does, and stores the
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


NOTHING = tl.constexpr(-(2**63) + 1)  # below the integer of every score, including -inf
_PART = 1024


def best_tokens(logits: Tensor, normalised: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Returns `models.layers.choice.best_log_probs`: [b, each] fp32 and int64."""
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


@triton.jit
def continuations(
    values,
    ids,
    ends,
    scores,
    members,
    inside,
    rows,
    BEAMS: tl.constexpr,
    EACH: tl.constexpr,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Returns a group's best continuations that do not end, and its best of all, as keys in descending order."""
    n = tl.arange(0, PLACES * PADDED)
    real = (n // PADDED < BEAMS) & (n % PADDED < EACH)
    known = real & (tl.load(inside + n // PADDED, mask=real, other=0) != 0)
    member = tl.minimum(tl.load(members + n // PADDED, mask=known, other=0), rows - 1)
    token = tl.load(ids + member * EACH + n % PADDED, mask=known, other=0)
    total = tl.load(values + member * EACH + n % PADDED, mask=known, other=float("-inf"))
    total += tl.load(scores + member, mask=known, other=0.0)
    ending = tl.load(ends + token, mask=known, other=0) != 0
    best_keys = tl.where(real, keyed(total, n), NOTHING)
    keys = tl.where(real, keyed(tl.where(ending, float("-inf"), total), n), NOTHING)

    place = tl.arange(0, PLACES)
    running = tl.full((PLACES,), NOTHING, tl.int64)
    best = tl.full((PLACES,), NOTHING, tl.int64)
    for i in range(BEAMS):
        largest = tl.max(keys, 0)
        running = tl.where(place == i, largest, running)
        keys = tl.where(keys == largest, NOTHING, keys)
        largest = tl.max(best_keys, 0)
        best = tl.where(place == i, largest, best)
        best_keys = tl.where(best_keys == largest, NOTHING, best_keys)
    return running, best


@triton.jit
def continuation_of(origins, within, place, rank, BEAMS: tl.constexpr):
    """Returns the index of the continuation that a row goes on with, as `_continuation_of` of `beam_search` does.

    ``origins`` holds the rank of the row that each continuation comes from.
    """
    # Rows of these matrices are continuations. Columns are ranks, or the continuations before.
    theirs = (origins[:, None] == place[None, :]) & within[:, None]
    keeps = tl.sum(theirs.to(tl.int32), 0) > 0
    own = (origins == rank) & within
    first = tl.min(tl.where(own, place, BEAMS - 1), 0)
    before = place[None, :] < place[:, None]
    others = (tl.sum(((origins[:, None] == origins[None, :]) & before).to(tl.int32), 1) > 0) & within
    empty_before = tl.sum(((~keeps) & within & (place < rank)).to(tl.int32), 0)
    # Selects the continuation with as many others before it as there are empty rows before this row.
    others_before = tl.sum((others[None, :] & before).to(tl.int32), 1)
    other = tl.min(tl.where(others & (others_before == empty_before), place, BEAMS - 1), 0)
    return tl.where(tl.sum(own.to(tl.int32), 0) > 0, first, other)


@triton.jit
def ranks_of(old, new, place):
    """Returns the rank of each old and new score among both. Equal scores rank old before new, then by place."""
    before = place[None, :] < place[:, None]
    old_rank = tl.sum(((old[None, :] > old[:, None]) | ((old[None, :] == old[:, None]) & before)).to(tl.int32), 1)
    old_rank += tl.sum((new[None, :] > old[:, None]).to(tl.int32), 1)
    new_rank = tl.sum(((new[None, :] > new[:, None]) | ((new[None, :] == new[:, None]) & before)).to(tl.int32), 1)
    new_rank += tl.sum((old[None, :] >= new[:, None]).to(tl.int32), 1)
    return old_rank, new_rank
