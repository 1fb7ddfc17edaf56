"""One step of beam search for every group of rows at once, of any sizes, beside rows that are no beams.

It is `_beam_search` of transformers, for a request alone, over rows in any slots: fixed shapes, and nothing that
the host must decide, so that a CUDA graph holds all of it. Each row works out the choice of its whole
group, which is small once its members' best tokens are known, and keeps its own part.
"""

import torch
from torch import Tensor

from models.beam_state import BeamState

_NEVER = float("-inf")


def select(
    log_probs: Tensor,  # [b, V] fp32
    tokens: Tensor,  # [b] int64: the greedy choice or the prompt's token; replaced in beams
    positions: Tensor,  # [b] int64: already that of `tokens`
    forced: Tensor,  # [b, L] int64, -1 where generation is free
    eos: Tensor,  # [E] int64
    state: BeamState,  # its first b slots are read and changed
) -> Tensor:  # [b] int64: the slot whose K/V each row goes on from; its own where it is no beam, or in its prompt
    """Choose each group's next tokens, keep the best of its finished hypotheses, and see whether its search ends.

    Once it has ended, ``state.outcomes`` of the group's first row holds the best hypothesis. What a step after that
    makes of it nobody reads.
    """
    rows = tokens.shape[0]
    at = positions.unsqueeze(1)
    own = torch.arange(rows, device=tokens.device)
    # A padding row may still hold a group of slots that this bucket has not.
    members, inside = state.members[:rows].clamp(max=rows - 1), state.inside[:rows]
    rank, ranks = state.ranks[:rows, :1], state.ranks[:rows]
    beams = members.shape[1]
    active = (forced.gather(1, at) < 0) & inside[:, :1]

    # As many of the best as leave enough to go on if every row's continuations include every end.
    keep = min(max(2, 1 + eos.shape[0]) * beams, log_probs.shape[1])
    values, ids = log_probs.topk(keep)
    totals = (values + state.scores[:rows].unsqueeze(1))[members].masked_fill(~inside.unsqueeze(2), _NEVER)
    best, index = totals.flatten(1).topk(keep)
    parents = members.gather(1, index // keep)
    chosen = ids[parents, index % keep]
    last = at + 1 >= state.ends[:rows].unsqueeze(1)
    ended = (chosen.unsqueeze(2) == eos).any(dim=2) | last

    # The beam of rank r goes on with continuation number r of those that do not end.
    going = (~ended).cumsum(dim=1)
    wanted = torch.cat((rank, torch.zeros_like(rank)), dim=1)  # its own, and the group's best
    place = (going.unsqueeze(1) <= wanted.unsqueeze(2)).sum(dim=2).clamp(max=keep - 1)
    running = best.gather(1, place)
    own_place = place[:, :1]
    parent = torch.where(active, parents.gather(1, own_place), own.unsqueeze(1))
    token = torch.where(active, chosen.gather(1, own_place), tokens.unsqueeze(1))
    score = torch.where(active.squeeze(1), running[:, 0], state.scores[:rows])

    # A continuation that ends is a hypothesis if it is among the group's best; the best hypotheses are kept.
    divisors = state.divisors[:rows].gather(2, at.unsqueeze(2).expand(-1, 2, -1)).squeeze(2)
    fresh = ended[:, :beams] & inside & active
    new = (best[:, :beams] / divisors[:, :1]).masked_fill(~fresh, _NEVER)
    old = state.finished[members].masked_fill(~inside, _NEVER)
    kept, which = torch.cat((old, new), dim=1).topk(beams)
    own_which = which.gather(1, rank)
    finished = kept.gather(1, ranks)  # its own, and the group's worst
    sources = torch.cat((members + state.slots, parents[:, :beams]), dim=1).gather(1, own_which)
    end_token = chosen.gather(1, (own_which - beams).clamp(min=0))

    sequences = state.sequences.index_select(0, torch.cat((parent, sources)).squeeze(1))
    # One that had finished before is shorter, so that this token is past its end.
    sequences.scatter_(1, torch.cat((at, at)), torch.cat((token, end_token)))
    hypotheses = sequences[rows:]
    length = torch.where(own_which < beams, hypotheses[:, -1:], at + 1)
    hypotheses[:, -1:] = length
    worst = finished[:, 1:]
    hopeless = running[:, 1:] / divisors[:, 1:] <= worst
    over = hopeless | (worst > state.limits[:rows].unsqueeze(1)) | last

    tokens.copy_(token.squeeze(1))
    state.scores[:rows].copy_(score)
    state.finished[:rows].copy_(finished[:, 0])
    state.sequences[:rows].copy_(sequences[:rows])
    state.sequences[state.slots : state.slots + rows].copy_(hypotheses)
    outcomes = state.outcomes[:rows]
    outcomes.copy_(hypotheses)
    outcomes[:, -1:] = torch.where(over & (rank == 0) & active, length, 0)
    return parent.squeeze(1)
