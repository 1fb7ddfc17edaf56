"""Penalises tokens that a row already holds, in its scores, before a token is chosen.

As transformers' processors of the same names, but for rows of different lengths, each with its own setting: shapes
are fixed, so that a CUDA graph holds all of it.
"""

import torch
from torch import Tensor

from snapcap.models.regions.names import forced_end


def penalise(
    logits: Tensor,  # [b, V] fp32
    tokens: Tensor,  # [b] int64: the greedy choice or the prompt's token; replaced where a row is penalised
    positions: Tensor,  # [b] int64: already that of `tokens`
    forced: Tensor,  # [b, L] int64, -1 where generation is free
    penalty: Tensor,  # [b] fp32, as all that follow what `BeamState` says; read
    ngrams: Tensor,  # [b] int64; read
    inside: Tensor,  # [b, M] bool; read
    sequences: Tensor,  # [2, slots, L + 1] int64: the rows' tokens; this one is added
    *,
    forces_end: bool = False,
) -> Tensor:  # [b, V] fp32
    """Scores with both penalties of each row, and the most likely token by these.

    transformers changes the log-probabilities of a beam and the logits of a lone row, and so does this. A beam's
    token is left to `beam_search.select`.

    Args:
        forces_end: ``forced`` may have `names.forced_end` of a token, which then is the only one to choose.
    """
    searched = inside[:, :1]
    scores = torch.where(searched, logits.log_softmax(dim=-1), logits)
    held = sequences[0, : len(tokens), :-1]
    penalise_repetition(scores, held, positions, penalty)
    ban_repeated_ngrams(scores, held, positions, ngrams)
    at = positions.unsqueeze(1)
    prompt = forced.gather(1, at)
    if forces_end:
        vocabulary = torch.arange(scores.shape[1], device=scores.device)
        only = torch.where(forced_end(vocabulary) == prompt, 0.0, float("-inf"))
        scores = torch.where(prompt < -1, only, scores)
    free = prompt.squeeze(1) < 0
    chosen = free & ((penalty != 1) | (ngrams > 0)) & ~searched.squeeze(1)
    tokens.copy_(torch.where(chosen, scores.argmax(dim=-1), tokens))
    sequences[0, : len(tokens)].scatter_(1, at, tokens.unsqueeze(1))
    return scores


def penalise_repetition(
    scores: Tensor,  # [b, V] fp32, changed in place
    sequences: Tensor,  # [b, L] int64: the row's tokens from the start token on
    lengths: Tensor,  # [b] int64, at least 1: how many of these there are
    penalty: Tensor,  # [b] fp32 above 0; 1 changes nothing
) -> None:
    """Make every token that a row holds less likely (Keskar et al., 2019, section 4.1): a positive score is
    divided by the penalty, a negative one multiplied."""
    places = torch.arange(sequences.shape[1], device=sequences.device)
    held = torch.where(places < lengths.unsqueeze(1), sequences, sequences[:, :1])
    found, penalty = scores.gather(1, held), penalty.unsqueeze(1)
    # A token that is held twice is written twice, with the same value.
    scores.scatter_(1, held, torch.where(found < 0, found * penalty, found / penalty))


def ban_repeated_ngrams(
    scores: Tensor,  # [b, V] fp32, changed in place
    sequences: Tensor,  # [b, L] int64: the row's tokens from the start token on
    lengths: Tensor,  # [b] int64: how many of these there are
    sizes: Tensor,  # [b] int64: tokens of an n-gram; 0 bans nothing
) -> None:
    """Exclude each token that would complete an n-gram which the row already holds (Paulus et al., 2017)."""
    length = sequences.shape[1]
    places = torch.arange(length, device=sequences.device)
    padded = torch.nn.functional.pad(sequences, (length, 0), value=-1)
    # before[b, j, k] is the token that stands L - k places before place j; `suffix` is that of the next place.
    before = padded.unfold(1, length, 1)[:, :length]
    suffix = padded.gather(1, lengths.unsqueeze(1) + places)
    compared = places > length - sizes.unsqueeze(1)  # the n - 1 places before
    same = ((before == suffix.unsqueeze(1)) | ~compared.unsqueeze(1)).all(dim=-1)
    complete = (places >= sizes.unsqueeze(1) - 1) & (places < lengths.unsqueeze(1))
    banned = same & complete & (sizes > 0).unsqueeze(1)
    bound = torch.where(banned, float("-inf"), float("inf"))
    # Places past the end hold anything that is a token; their bound is +inf, which changes nothing.
    scores.scatter_reduce_(1, sequences, bound, "amin")
