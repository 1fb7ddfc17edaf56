"""Penalties over rows of different lengths and settings against transformers' processors, a row at a time."""

import random

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from snapcap.models.regions.choice.penalties import ban_repeated_ngrams, penalise, penalise_repetition

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


def test_rows_choose_by_their_penalised_scores_and_beams_and_prompts_do_not() -> None:
    scores, held, positions = rows(random.Random(3), 5)
    held[:, 0], positions = scores.argmax(dim=1), positions.clamp(min=3)
    sequences = torch.zeros(2, 7, LENGTH + 1, dtype=torch.int64)
    sequences[0, :5, :-1] = held
    tokens, forced = scores.argmax(dim=1), torch.full((5, LENGTH), -1)
    forced[1] = 4  # inside its prompt
    tokens[1] = 4
    penalty, ngrams = torch.tensor([5.0, 5.0, 1.0, 1.0, 5.0]), torch.tensor([0, 0, 1, 0, 0])
    inside = torch.zeros(5, 4, dtype=torch.bool)
    inside[4, :2] = True  # a beam
    greedy, before = tokens.clone(), sequences.clone()
    result = penalise(scores, tokens, positions, forced, penalty, ngrams, inside, sequences)

    want = scores.clone()
    want[4] = scores[4].log_softmax(-1)
    penalise_repetition(want, held, positions, penalty)
    ban_repeated_ngrams(want, held, positions, ngrams)
    assert torch.equal(result, want)
    best = want.argmax(dim=1)
    assert tokens.tolist() == [best[0], 4, best[2], greedy[3], greedy[4]]
    assert tokens[0] != greedy[0]
    assert tokens[2] != greedy[2]
    before[0, torch.arange(5), positions] = tokens
    assert torch.equal(sequences, before)
