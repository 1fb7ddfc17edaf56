"""Samples the next token of each row at random; temperature 0 keeps the greedy token."""

import torch
import torch.nn.functional as F
from torch import Tensor

_PART = 256


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
    parts = F.pad(numbers, (0, -vocabulary % _PART)).view(rows, -1, _PART).cumsum(dim=-1)
    ends = parts[:, :, -1].cumsum(dim=-1)
    starts = F.pad(ends[:, :-1], (1, 0)).unsqueeze(2)
    return (starts + parts).view(rows, -1)[:, :vocabulary]
