"""Changes the scores of each row's tokens before one is chosen, by the row's settings and the checkpoint's rules.

The rules and their order are those of transformers' logits processors. Unlike those, the functions here take rows
of different lengths and settings, and their shapes are fixed, so a CUDA graph can hold them.
"""

import torch
from torch import Tensor

from snapcap.models.regions.names import forced_end

_NEVER = float("-inf")


def penalise(
    logits: Tensor,  # [b, V] fp32
    tokens: Tensor,  # [b] int64: the greedy choice or the prompt's token; replaced where a row is penalised
    positions: Tensor,  # [b] int64: position of `tokens`
    forced: Tensor,  # [b, L] int64: -1 where generation is free; `names.forced_end` where generation must end
    ends: Tensor,  # [V] bool; `TokenRules` describes this and the next four tensors; read
    before: Tensor,  # [V] bool; read
    biases: Tensor,  # [3, V] fp32; read
    phrases: Tensor,  # [P, K] int64; read
    phrase_biases: Tensor,  # [P] fp32; read
    penalised: Tensor,  # [b] bool; `BeamState` describes this and the following tensors; read
    penalty: Tensor,  # [b] fp32; read
    ngrams: Tensor,  # [b] int64; read
    endings: Tensor,  # [b, L] fp32; read
    firsts: Tensor,  # [b] int64; read
    inside: Tensor,  # [b, M] bool; read
    sequences: Tensor,  # [2, slots, L + 1] int64: the rows' tokens, to which `tokens` is added
) -> Tensor:  # [b, V] fp32
    """Returns the changed scores, and replaces ``tokens`` by the most likely token in penalised rows.

    In transformers too, the scores of a beam are log-probabilities, and those of any other row are logits. A
    beam's token is left to `beam_search.select`.
    """
    searched = inside[:, :1]
    scores = torch.where(searched, logits.log_softmax(dim=-1), logits)
    held = sequences[0, : len(tokens), :-1]
    scores = scores + biases_of(held, positions, biases[0], phrases, phrase_biases)
    penalise_repetition(scores, held, positions, penalty, before)
    ban_repeated_ngrams(scores, held, positions, ngrams)
    at = positions.unsqueeze(1)
    scores = torch.where(ends, end_scores(scores, endings.gather(1, at)), scores)
    prompt = forced.gather(1, at)
    vocabulary = torch.arange(scores.shape[1], device=scores.device)
    only = torch.where(forced_end(vocabulary) == prompt, 0.0, _NEVER)
    scores = torch.where(prompt < -1, only, scores)
    scores = scores + biases[1] + torch.where(at == firsts.unsqueeze(1), biases[2], 0.0)
    chosen = (prompt.squeeze(1) < 0) & penalised & ~searched.squeeze(1)
    tokens.copy_(torch.where(chosen, scores.argmax(dim=-1), tokens))
    sequences[0, : len(tokens)].scatter_(1, at, tokens.unsqueeze(1))
    return scores


def biases_of(
    sequences: Tensor,  # [b, L] int64: the row's tokens from the start token on
    lengths: Tensor,  # [b] int64: number of the row's tokens
    single: Tensor,  # [V] fp32
    phrases: Tensor,  # [P, K] int64
    phrase_biases: Tensor,  # [P] fp32
) -> Tensor:  # [b, V] fp32
    """Returns the number to add to each token's score: the token's own bias, plus the bias of every phrase that it
    would complete."""
    before = phrases[:, :-1]
    padded = torch.nn.functional.pad(sequences, (before.shape[1], 0), value=-1)
    places = torch.arange(before.shape[1], device=sequences.device)
    suffix = padded.gather(1, lengths.unsqueeze(1) + places)  # the row's last K - 1 tokens
    complete = ((before == suffix.unsqueeze(1)) | (before < 0)).all(dim=-1)
    added = torch.where(complete, phrase_biases, 0.0)
    return single.expand(len(sequences), -1).scatter_add(1, phrases[:, -1].expand(len(sequences), -1), added)


def penalise_repetition(
    scores: Tensor,  # [b, V] fp32, changed in place
    sequences: Tensor,  # [b, L] int64: the row's tokens from the start token on
    lengths: Tensor,  # [b] int64, at least 1: number of the row's tokens
    penalty: Tensor,  # [b] fp32 above 0; 1 changes nothing
    before: Tensor,  # [V] bool: the tokens of the text before `sequences`
) -> None:
    """Makes every token that a row holds less likely (Keskar et al., 2019, section 4.1): divides a positive score
    by the penalty, and multiplies a negative one."""
    places = torch.arange(sequences.shape[1], device=sequences.device)
    held = torch.where(places < lengths.unsqueeze(1), sequences, sequences[:, :1])
    found, penalty = scores.gather(1, held), penalty.unsqueeze(1)
    scores.copy_(torch.where(before, _less_likely(scores, penalty), scores))
    # A token that occurs twice in a row is written twice, with the same value.
    scores.scatter_(1, held, _less_likely(found, penalty))


def _less_likely(scores: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def ban_repeated_ngrams(
    scores: Tensor,  # [b, V] fp32, changed in place
    sequences: Tensor,  # [b, L] int64: the row's tokens from the start token on
    lengths: Tensor,  # [b] int64: number of the row's tokens
    sizes: Tensor,  # [b] int64: number of tokens in an n-gram; 0 bans nothing
) -> None:
    """Sets to -inf the score of each token that would complete an n-gram which the row already holds (Paulus et
    al., 2017)."""
    length = sequences.shape[1]
    places = torch.arange(length, device=sequences.device)
    padded = torch.nn.functional.pad(sequences, (length, 0), value=-1)
    # before[b, j, k] is the token L - k places before place j; `suffix` is the same for the place after the last
    # token.
    before = padded.unfold(1, length, 1)[:, :length]
    suffix = padded.gather(1, lengths.unsqueeze(1) + places)
    compared = places > length - sizes.unsqueeze(1)  # the n - 1 places before
    same = ((before == suffix.unsqueeze(1)) | ~compared.unsqueeze(1)).all(dim=-1)
    complete = (places >= sizes.unsqueeze(1) - 1) & (places < lengths.unsqueeze(1))
    banned = same & complete & (sizes > 0).unsqueeze(1)
    bound = torch.where(banned, _NEVER, float("inf"))
    # Places behind the end hold arbitrary tokens; their bound of +inf changes nothing.
    scores.scatter_reduce_(1, sequences, bound, "amin")


def end_scores(scores: Tensor, ending: Tensor) -> Tensor:
    """Returns the scores [b, V] that tokens have as ends: the score plus ``ending`` [b, 1] times its absolute
    value, or -inf where ``ending`` is -inf. An excluded token stays excluded."""
    grown = scores + torch.where(scores.isfinite(), scores.abs() * ending, 0.0)
    return torch.where(ending == _NEVER, _NEVER, grown)
