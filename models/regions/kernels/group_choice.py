"""Computes parts of `models.regions.kernels.beams`: a group's choice among its few best continuations."""

import triton
import triton.language as tl

from snapcap.models.regions.kernels.best_tokens import NOTHING, keyed


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
