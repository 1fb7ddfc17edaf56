"""Chooses the next token of each row: greedily, or by penalties, sampling and beam search.

Rules for scores, and their order, are those of transformers' logits processors. Unlike those, the functions here
take rows of different lengths and settings. Shapes are fixed and the host decides nothing, so a CUDA graph can
hold a whole step.

Beam search runs for all groups of rows at once. Groups may have different sizes, and rows outside of any group may
run beside them. For a single request the result is that of `_beam_search` of transformers. Each row computes the
choice of its whole group and keeps its own part. This repeated work is small once the best tokens of all members
are known.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.dimensions import forced_end

_NEVER = float("-inf")


def advance(
    logits: Tensor,  # [b, V]
    tokens: Tensor,  # [b] int64, replaced by the next tokens
    positions: Tensor,  # [b] int64, advanced by one
    forced: Tensor,  # [b, L] int64: the prompt's token at each position, -1 where generation is free
) -> None:
    """Replaces ``tokens`` by the prompt's token at the next position, or else by the greedy token, and advances
    ``positions``.

    Positions stop at L - 1, so a padding row can run for ever without leaving its cache.
    """
    following = (positions + 1).clamp(max=forced.shape[1] - 1)
    prompt = forced.gather(1, following.unsqueeze(1)).squeeze(1)
    tokens.copy_(torch.where(prompt >= 0, prompt, logits.argmax(dim=-1)))
    positions.copy_(following)


def penalise(
    logits: Tensor,  # [b, V] fp32
    tokens: Tensor,  # [b] int64: the greedy choice or the prompt's token; replaced where a row is penalised
    positions: Tensor,  # [b] int64: position of `tokens`
    forced: Tensor,  # [b, L] int64: -1 where generation is free; `dimensions.forced_end` where generation must end
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
    /,
) -> Tensor:  # [b, V] fp32
    """Returns the changed scores, and replaces ``tokens`` by the most likely token in penalised rows.

    In transformers too, the scores of a beam are log-probabilities, and those of any other row are logits. A
    beam's token is left to `select`.
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


_SUMMED = 256


def sample(
    logits: Tensor,  # [b, V] fp32
    tokens: Tensor,  # [b] int64: the greedy choice or the prompt's token; replaced where a row samples
    positions: Tensor,  # [b] int64: position of `tokens`
    forced: Tensor,  # [b, L] int64, -1 where generation is free
    uniforms: Tensor,  # [b, L] fp32 in [0, 1): one number for each position, drawn from the request's seed
    temperature: Tensor,  # [b] fp32, 0 for greedy
    top_k: Tensor,  # [b] int64, V for no limit
    top_p: Tensor,  # [b] fp32 in (0, 1]
    sequences: Tensor,  # [2, slots, L + 1] int64: the rows' tokens, to which the new ones are added
    /,
) -> Tensor:  # [b] int64: the tokens
    """Draws a token from each row's truncated distribution, by inverting its cumulative sum. Returns the tokens.

    Logits are divided by the temperature. The ``top_k`` most likely tokens are kept, and of these the fewest whose
    probability reaches ``top_p`` (Holtzman et al., 2020). The random number depends only on the request and the
    position, so a request gets the same tokens alone and in a full batch.
    """
    scaled = logits / temperature.clamp(min=1e-5).unsqueeze(1)
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill(rank >= top_k.unsqueeze(1), float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = _cumulative(probabilities) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p.unsqueeze(1), 0.0)
    cumulative = _cumulative(probabilities)
    at = positions.unsqueeze(1)
    threshold = uniforms.gather(1, at) * cumulative[:, -1:]
    # A number just below 1 may round to 1 in fp32. The limit keeps it from choosing a token that was cut off.
    # Clamped: a row that is not sampled may keep none.
    last_kept = (probabilities > 0).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    choice = (cumulative <= threshold).sum(dim=-1, keepdim=True).minimum(last_kept)
    drawn = ids.gather(1, choice).squeeze(1)
    free = forced.gather(1, at).squeeze(1) < 0
    chosen = torch.where(free & (temperature > 0), drawn, tokens)
    tokens.copy_(chosen)
    sequences[0, : len(tokens)].scatter_(1, at, chosen.unsqueeze(1))
    return chosen


def _cumulative(numbers: Tensor) -> Tensor:
    """Returns ``numbers.cumsum(dim=-1)`` for numbers [b, V] that are at least 0; the result never decreases
    either.

    The sum runs within parts and then over the parts: with few rows, one sum along a large vocabulary is slow on a
    GPU.
    """
    rows, vocabulary = numbers.shape
    parts = F.pad(numbers, (0, -vocabulary % _SUMMED)).view(rows, -1, _SUMMED).cumsum(dim=-1)
    ends = parts[:, :, -1].cumsum(dim=-1)
    starts = F.pad(ends[:, :-1], (1, 0)).unsqueeze(2)
    return (starts + parts).view(rows, -1)[:, :vocabulary]


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
    /,
    *,
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


def reorder(
    key: Tensor,  # [N, slots or one more, H, d, L]
    value: Tensor,  # [N, slots or one more, H, L, d]
    # [b] int64: the slot that each of the first b rows goes on from; its own slot for a row that stays
    parents: Tensor,
    positions: Tensor,  # [b] int64: position of the next token; cached tokens are before it
) -> None:
    """Gives each row the cached K/V of its parent. Copies every row, because the host does not know which rows
    move."""
    rows, length = parents.shape[0], value.shape[3]
    cached = (torch.arange(length, device=parents.device) < positions.unsqueeze(1)).view(1, rows, 1, length, 1)
    for cache in (key.mT, value):  # on CUDA, keys lie in memory like values
        own = cache[:, :rows]
        own.copy_(torch.where(cached, cache.index_select(1, parents), own))
