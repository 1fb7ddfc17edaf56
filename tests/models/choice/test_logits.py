"""Penalties over rows of different lengths and settings against transformers' processors, a row at a time."""

import random

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from snapcap.models.choice.penalties import ban_repeated_ngrams, penalise_repetition

VOCABULARY, LENGTH = 9, 14


def rows(luck: random.Random, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of both signs; sequences of few tokens, so that n-grams repeat; past their end they hold anything."""
    scores = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(luck.randrange(10**6)))
    sequences = torch.tensor([luck.choices(range(4), k=LENGTH) for _ in range(count)])
    lengths = torch.tensor([luck.randint(1, LENGTH - 1) for _ in range(count)])
    return scores, sequences, lengths


@pytest.mark.parametrize("seed", range(10))
def test_repetition_is_penalised_as_transformers_does(seed: int) -> None:
    luck = random.Random(seed)
    scores, sequences, lengths = rows(luck, 8)
    penalty = torch.tensor([luck.choice((1.0, 1.3, 2.5, 0.5)) for _ in range(8)])
    want = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(value)(sequences[row : row + 1, :length], scores[row : row + 1])
            for row, (value, length) in enumerate(zip(penalty.tolist(), lengths.tolist(), strict=True))
        ]
    )
    penalise_repetition(scores, sequences, lengths, penalty)
    torch.testing.assert_close(scores, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(20))
def test_ngrams_are_banned_as_transformers_does(seed: int) -> None:
    luck = random.Random(seed)
    scores, sequences, lengths = rows(luck, 8)
    sizes = torch.tensor([luck.choice((0, 1, 2, 2, 3, 4, 50)) for _ in range(8)])
    want = scores.clone()
    for row, (size, length) in enumerate(zip(sizes.tolist(), lengths.tolist(), strict=True)):
        if size:
            want[row] = NoRepeatNGramLogitsProcessor(size)(sequences[row : row + 1, :length], scores[row : row + 1])
    ban_repeated_ngrams(scores, sequences, lengths, sizes)
    assert torch.equal(scores, want)
    if seed == 0:
        assert want.isinf().any()


def test_settings_that_change_nothing_change_no_bit() -> None:
    scores, sequences, lengths = rows(random.Random(1), 8)
    want = scores.clone()
    penalise_repetition(scores, sequences, lengths, torch.ones(8))
    ban_repeated_ngrams(scores, sequences, lengths, torch.zeros(8, dtype=torch.int64))
    assert torch.equal(scores, want)
