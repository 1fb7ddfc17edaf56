"""One step of beam search for every group of rows at once, of any sizes, beside rows that are no beams.

It is `_beam_search` of transformers, for a request alone, over rows in any slots: fixed shapes, and nothing that
the host must decide, so that a CUDA graph holds all of it. Each row works out the choice of its whole group, which
is small once its members' best tokens are known, and keeps its own part.
"""

import torch
from torch import Tensor

from snapcap.models.regions.state.reorder import reorder

_NEVER = float("-inf")
# The best tokens of a row are among the parts of this size whose largest score is best.
_PART = 128


def select(
    logits: Tensor,  # [b, V] fp32
    normalised: Tensor,  # [1] bool: they are log-probabilities, which penalties have changed
    tokens: Tensor,  # [b] int64: the greedy choice or the prompt's token; replaced in beams
    positions: Tensor,  # [b] int64: already that of `tokens`
    forced: Tensor,  # [b, L] int64, -1 where generation is free
    ends: Tensor,  # [V] bool: the tokens that end a hypothesis; at most as many as M, or see `per_row`
    key_cache: Tensor,  # [N, slots or one more, H, d, L]; on CUDA rows' K/V are moved, on a CPU by the host
    value_cache: Tensor,  # [N, slots or one more, H, L, d], likewise
    members: Tensor,  # [b, M] int64, as all that follow what `BeamState` says; read
    inside: Tensor,  # [b, M] bool; read
    ranks: Tensor,  # [b, 2] int64; read
    lasts: Tensor,  # [b] int64; read
    divisors: Tensor,  # [b, 2, L] fp32; read
    limits: Tensor,  # [b] fp32; read
    scores: Tensor,  # [b] fp32; replaced
    finished: Tensor,  # [b] fp32; replaced
    sequences: Tensor,  # [2, slots, L + 1] int64; the first b slots are replaced
    outcomes: Tensor,  # [b, L + 1] int64; replaced
    per_row: int = 0,
) -> Tensor:  # [b] int64: the slot whose K/V each row goes on from; its own where it is no beam, or in its prompt
    """Choose each group's next tokens, keep the best of its finished hypotheses, and see whether its search ends.

    Once it has ended, ``outcomes`` of the group's first row holds the best hypothesis. What a step after that makes
    of it nobody reads.

    Args:
        per_row: each row's continuations that are looked at: M, and as many as there are ends. 0 is 2 M. Where M is
            more than b, it is b.
    """
    rows = len(members)
    beams = min(members.shape[1], rows)  # no group has more, whatever other buckets hold
    at = positions.unsqueeze(1)
    own = torch.arange(rows, device=tokens.device).unsqueeze(1)
    # A padding row may still hold a group of slots that this bucket has not.
    members, inside = members[:, :beams].clamp(max=rows - 1), inside[:, :beams]
    ranks = ranks.clamp(max=beams - 1)
    rank = ranks[:, :1]
    active = (forced.gather(1, at) < 0) & inside[:, :1]
    last = at >= lasts.unsqueeze(1)

    # All continuations of a group, as many of each row as could be among its best.
    values, ids = best_log_probs(logits, normalised, min(per_row or 2 * beams, logits.shape[1]))
    each = values.shape[1]
    totals = (values + scores.unsqueeze(1))[members].masked_fill(~inside.unsqueeze(2), _NEVER).flatten(1)
    continued = ids[members].flatten(1)
    ending = ends[continued]

    # As many go on as there are beams, the best of those that do not end; in one call with the best of all.
    (running, best), (going_on, which) = torch.stack((totals.masked_fill(ending, _NEVER), totals)).topk(beams)
    number = _continuation_of(going_on // each, inside, rank)
    chosen = going_on.gather(1, number)
    parent = torch.where(active, members.gather(1, chosen // each), own)
    token = torch.where(active, continued.gather(1, chosen), tokens.unsqueeze(1))
    score = torch.where(active, running.gather(1, number), scores.unsqueeze(1))

    # A continuation that ends is a hypothesis if it is among the group's best; the best hypotheses are kept.
    divisor = divisors.gather(2, at.unsqueeze(2).expand(-1, 2, -1)).squeeze(2)
    fresh = (ending.gather(1, which) | last) & inside & active
    new = (best / divisor[:, :1]).masked_fill(~fresh, _NEVER)
    old = finished[members].masked_fill(~inside, _NEVER)
    kept, places = torch.cat((old, new), dim=1).topk(beams)
    place = places.gather(1, rank)
    is_new = place >= beams
    # One that had finished before is shorter, so that what is written at this position is past its end.
    source = which.gather(1, (place - beams).clamp(min=0))
    held = torch.where(is_new, members.gather(1, source // each), members.gather(1, place.clamp(max=beams - 1)))
    end = continued.gather(1, source)

    half = torch.cat((torch.zeros_like(own), (~is_new).to(own.dtype)))
    rewritten = sequences[half.squeeze(1), torch.cat((parent, held)).squeeze(1)]
    rewritten = rewritten.scatter(1, torch.cat((at, at)), torch.cat((token, end)))
    length = torch.where(is_new, at + 1, rewritten[rows:, -1:])
    hypotheses = torch.cat((rewritten[rows:, :-1], length), dim=1)

    worst = kept.gather(1, ranks[:, 1:])
    hopeless = running[:, :1] / divisor[:, 1:] <= worst
    over = (hopeless | (worst > limits.unsqueeze(1)) | last) & active & (rank == 0)

    tokens.copy_(token.squeeze(1))
    scores.copy_(score.squeeze(1))
    finished.copy_(kept.gather(1, rank).squeeze(1))
    sequences[0, :rows].copy_(rewritten[:rows])
    sequences[1, :rows].copy_(hypotheses)
    outcomes.copy_(torch.cat((hypotheses[:, :-1], torch.where(over, length, 0)), dim=1))
    parents = parent.squeeze(1)
    if key_cache.is_cuda:
        reorder(key_cache, value_cache, parents, positions)
    return parents


def _continuation_of(origins: Tensor, inside: Tensor, rank: Tensor) -> Tensor:
    """Which of its group's continuations [b, M] a row goes on with: [b, 1].

    A row that one of them comes from (``origins``, by rank) keeps the first of these, and its K/V stay where they
    are; the others go to the rows that none comes from. So no row that is moved from is moved into.
    """
    places = torch.arange(origins.shape[1], device=origins.device)
    from_place = (origins.unsqueeze(1) == places.unsqueeze(1)) & inside.unsqueeze(1)  # [b, place, continuation]
    keeps = from_place.any(dim=2)
    own = from_place.gather(1, rank.unsqueeze(2).expand(-1, -1, len(places))).squeeze(1)
    first = (own.cumsum(dim=1) < 1).sum(dim=1, keepdim=True)
    earlier = places.unsqueeze(0) < places.unsqueeze(1)  # [continuation, one before it]
    others = ((origins.unsqueeze(2) == origins.unsqueeze(1)) & earlier).any(dim=2) & inside
    empty_before = (~keeps & inside & (places < rank)).sum(dim=1, keepdim=True)
    other = (others.cumsum(dim=1) <= empty_before).sum(dim=1, keepdim=True)
    return torch.where(keeps.gather(1, rank), first, other).clamp(max=len(places) - 1)


def best_log_probs(logits: Tensor, normalised: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest log-probabilities of each row, in descending order, and the tokens they are of: [b, count].

    A logarithm of the softmax keeps the order of logits, so only those that are chosen need one.
    """
    best, ids = largest(logits, count)
    top = best[:, :1]
    total = (logits - top).exp().sum(dim=1, keepdim=True)
    return torch.where(normalised, best, best - top - total.log()), ids


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What ``scores.topk(count)`` gives, but for the order of equal ones; over a large vocabulary in less time.

    Of parts of it, those with the ``count`` largest maxima hold the ``count`` largest scores: any other part's
    scores are at most its own maximum, which as many others reach. A last part that is shorter is always searched.
    """
    vocabulary = scores.shape[1]
    parts = vocabulary // _PART
    if parts <= 2 * count:
        return scores.topk(count)
    whole = scores[:, : parts * _PART].view(len(scores), parts, _PART)
    chosen = whole.amax(dim=2).topk(count, sorted=False).indices.unsqueeze(2)
    places = torch.arange(_PART, device=scores.device)
    ids = torch.cat(
        (
            (chosen * _PART + places).flatten(1),
            torch.arange(parts * _PART, vocabulary, device=scores.device).expand(len(scores), -1),
        ),
        dim=1,
    )
    best, index = scores.gather(1, ids).topk(count)
    return best, ids.gather(1, index)
