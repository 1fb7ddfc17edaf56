"""The arithmetic of a group's choice, over its few best continuations: parts of `models.regions.kernels.beams`."""

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
    """A group's best continuations that do not end, and its best of all, as keys in descending order."""
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
    """Which of its group's continuations a row goes on with, as the function of this name in `beam_search`.

    ``origins``: the rank of the row that each comes from.
    """
    # As rows, continuations; as columns, ranks or the continuations before.
    theirs = (origins[:, None] == place[None, :]) & within[:, None]
    keeps = tl.sum(theirs.to(tl.int32), 0) > 0
    own = (origins == rank) & within
    first = tl.min(tl.where(own, place, BEAMS - 1), 0)
    before = place[None, :] < place[:, None]
    others = (tl.sum(((origins[:, None] == origins[None, :]) & before).to(tl.int32), 1) > 0) & within
    empty_before = tl.sum(((~keeps) & within & (place < rank)).to(tl.int32), 0)
    # The one before which as many others stand as empty rows before this one.
    others_before = tl.sum((others[None, :] & before).to(tl.int32), 1)
    other = tl.min(tl.where(others & (others_before == empty_before), place, BEAMS - 1), 0)
    return tl.where(tl.sum(own.to(tl.int32), 0) > 0, first, other)


@triton.jit
def ranks_of(old, new, place):
    """How many of both come before each; of equal ones first the old, and the first."""
    before = place[None, :] < place[:, None]
    old_rank = tl.sum(((old[None, :] > old[:, None]) | ((old[None, :] == old[:, None]) & before)).to(tl.int32), 1)
    old_rank += tl.sum((new[None, :] > old[:, None]).to(tl.int32), 1)
    new_rank = tl.sum(((new[None, :] > new[:, None]) | ((new[None, :] == new[:, None]) & before)).to(tl.int32), 1)
    new_rank += tl.sum((old[None, :] >= new[:, None]).to(tl.int32), 1)
    return old_rank, new_rank
