"""Computes one step of beam search for all groups of rows at once.

Groups may have different sizes, and rows outside of any group may run beside them. For a single request the result
is that of `_beam_search` of transformers. Shapes are fixed and the host decides nothing, so a CUDA graph can hold
the whole step. Each row computes the choice of its whole group and keeps its own part. This repeated work is small
once the best tokens of all members are known.
"""

import torch
from torch import Tensor

from snapcap.models.regions.state.reorder import reorder

_NEVER = float("-inf")
# `largest` splits a vocabulary into parts of this size, and searches only the parts with the largest maxima.
_PART = 128


def select(
    logits: Tensor,  # [b, V] fp32
    normalised: Tensor,  # [1] bool: `logits` are log-probabilities already, because penalties have changed them
    tokens: Tensor,  # [b] int64: the greedy choice or the prompt's token; replaced in rows that are beams
    positions: Tensor,  # [b] int64: position of `tokens`
    forced: Tensor,  # [b, L] int64, -1 where generation is free
    ends: Tensor,  # [V] bool: the tokens that end a hypothesis; if there are more than M, `per_row` must be given
    key_cache: Tensor,  # [N, slots or one more, H, d, L]; on CUDA this step moves rows' K/V, on a CPU the host does
    value_cache: Tensor,  # [N, slots or one more, H, L, d], likewise
    members: Tensor,  # [b, M] int64; `BeamState` describes this and the following tensors; read
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
) -> Tensor:  # [b] int64: the slot whose K/V each row continues; its own unless a beam changes rows
    """Chooses each group's next tokens, keeps its best finished hypotheses, and decides whether its search ends.

    When a search ends, the group's first row of ``outcomes`` holds the best hypothesis. Later steps overwrite it,
    but nobody reads it then.

    Args:
        per_row: number of continuations considered in each row. M plus the number of ``ends`` is always enough. 0
            stands for 2 M. If M is more than b, M stands for b.
    """
    rows = len(members)
    # A group cannot have more members than the step has rows, even if larger buckets have a larger M.
    beams = min(members.shape[1], rows)
    at = positions.unsqueeze(1)
    own = torch.arange(rows, device=tokens.device).unsqueeze(1)
    # A padding row may still hold a group whose slots are outside of this bucket.
    members, inside = members[:, :beams].clamp(max=rows - 1), inside[:, :beams]
    ranks = ranks.clamp(max=beams - 1)
    rank = ranks[:, :1]
    active = (forced.gather(1, at) < 0) & inside[:, :1]
    last = at >= lasts.unsqueeze(1)

    # Collects all continuations of a group that could be among its best.
    values, ids = best_log_probs(logits, normalised, min(per_row or 2 * beams, logits.shape[1]))
    each = values.shape[1]
    totals = (values + scores.unsqueeze(1))[members].masked_fill(~inside.unsqueeze(2), _NEVER).flatten(1)
    continued = ids[members].flatten(1)
    ending = ends[continued]

    # Each beam takes one of the best continuations that do not end. The same topk finds the best of all.
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
    # An older hypothesis is shorter, so the token written at this position lies behind its end.
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
    """Returns the index of the continuation that each row goes on with, among its group's [b, M]: [b, 1].

    ``origins`` [b, M] holds the rank of the row that each continuation comes from. A row with continuations of its
    own keeps the first of these, so its K/V stay in place. The other continuations go to the rows that have none.
    So a row whose K/V are copied elsewhere is never overwritten.
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
    """Returns each row's ``count`` largest log-probabilities, in descending order, and their tokens: [b, count].

    The log-softmax keeps the order of the logits, so it is computed for the chosen ones only. If ``normalised`` is
    true, the scores are returned unchanged.
    """
    best, ids = largest(logits, count)
    top = best[:, :1]
    total = (logits - top).exp().sum(dim=1, keepdim=True)
    return torch.where(normalised, best, best - top - total.log()), ids


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns ``scores.topk(count)``, with equal scores in any order, and takes less time over a large vocabulary.

    The vocabulary is split into parts, and only the ``count`` parts with the largest maxima are searched. No other
    part can hold a larger score: its scores are at most its maximum, and ``count`` parts have a maximum at least
    as large. The shorter last part is always searched.
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
