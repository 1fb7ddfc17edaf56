"""Penalties over rows of different lengths and settings against transformers' processors, a row at a time."""

import random

import pytest
import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from snapcap.models.dimensions import forced_end
from snapcap.models.layers.choice import (
    ban_repeated_ngrams,
    biases_of,
    end_scores,
    penalise,
    penalise_repetition,
)
from snapcap.models.memory.torch_memory import TorchHostMemory
from snapcap.models.regions.state import RowStart, TokenRules

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
    text = torch.tensor([luck.sample(range(VOCABULARY), seed % 4)], dtype=torch.int64)  # before every row's own
    want = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(value)(
                torch.cat((text, sequences[row : row + 1, :length]), dim=1), scores[row : row + 1]
            )
            for row, (value, length) in enumerate(zip(penalty.tolist(), lengths.tolist(), strict=True))
        ]
    )
    before = torch.zeros(VOCABULARY, dtype=torch.bool)
    before[text[0]] = True
    penalise_repetition(scores, sequences, lengths, penalty, before)
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


@pytest.mark.parametrize("seed", range(10))
def test_sequences_are_biased_as_transformers_does(seed: int) -> None:
    luck = random.Random(seed)
    scores, sequences, lengths = rows(luck, 8)
    phrases = {tuple(luck.choices(range(4), k=luck.randint(1, 4))): luck.uniform(-2, 2) for _ in range(20)}
    bad = [luck.choices(range(5), k=luck.randint(1, 3)) for _ in range(3)]
    pairs = [[list(ids), bias] for ids, bias in phrases.items()]
    banned = {tuple(ids): float("-inf") for ids in bad}
    want = scores.clone()
    for row, length in enumerate(lengths.tolist()):
        held = sequences[row : row + 1, :length]
        want[row] = SequenceBiasLogitsProcessor(pairs)(held, want[row : row + 1])
        want[row] = NoBadWordsLogitsProcessor(bad)(held, want[row : row + 1])
    rules = TokenRules.allocate(VOCABULARY, TorchHostMemory())
    rules.write([], [], {ids: bias for ids, bias in phrases.items() if ids not in banned} | banned, [], [])
    got = scores + biases_of(sequences, lengths, rules.biases[0], rules.phrases, rules.phrase_biases)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert want.isinf().any()


@pytest.mark.parametrize("growth", [None, (3, 1.7), (0, 0.9)])
def test_ends_come_late_and_grow_as_in_transformers(growth: tuple[int, float] | None) -> None:
    scores = torch.randn(LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(4))
    scores[2, 1] = 0.0
    scores[9, 1] = float("-inf")
    begun, least, ends = (5, 6, 7), 6, torch.zeros(VOCABULARY, dtype=torch.bool)
    ends[[1, 4]] = True
    table = torch.from_numpy(RowStart(begun, 3, least=least, end_growth=growth).endings(LENGTH))
    got = torch.where(ends, end_scores(scores, table.unsqueeze(1)), scores)
    for length in range(1, LENGTH):
        held = torch.zeros(1, length, dtype=torch.int64)
        want = MinLengthLogitsProcessor(least, [1, 4])(held, scores[length : length + 1])
        if growth is not None:
            want = ExponentialDecayLengthPenalty(growth, [1, 4], len(begun))(held, want)
        torch.testing.assert_close(got[length : length + 1], want, rtol=1e-5, atol=1e-6)
    assert not got.isnan().any()


def test_settings_that_change_nothing_change_no_bit() -> None:
    scores, sequences, lengths = rows(random.Random(1), 8)
    want = scores.clone()
    penalise_repetition(scores, sequences, lengths, torch.ones(8), torch.ones(VOCABULARY, dtype=torch.bool))
    ban_repeated_ngrams(scores, sequences, lengths, torch.zeros(8, dtype=torch.int64))
    rules = TokenRules.allocate(VOCABULARY, TorchHostMemory())
    scores += biases_of(sequences, lengths, rules.biases[0], rules.phrases, rules.phrase_biases)
    scores = end_scores(scores, torch.from_numpy(RowStart((3,), 1).endings(8)).unsqueeze(1))
    assert torch.equal(scores, want)


def test_rows_choose_by_their_penalised_scores_and_beams_and_prompts_do_not() -> None:
    scores, held, positions = rows(random.Random(3), 6)
    held[:, 0], positions = scores.argmax(dim=1), positions.clamp(min=3)
    sequences = torch.zeros(2, 7, LENGTH + 1, dtype=torch.int64)
    sequences[0, :6, :-1] = held
    tokens, forced = scores.argmax(dim=1), torch.full((6, LENGTH), -1)
    forced[1] = 4  # inside its prompt
    tokens[1] = 4
    forced[5] = forced_end(8)
    penalty, ngrams = torch.tensor([5.0, 5.0, 1.0, 1.0, 5.0, 1.0]), torch.tensor([0, 0, 1, 0, 0, 0])
    penalised = torch.tensor([True, True, True, False, True, True])
    inside = torch.zeros(6, 4, dtype=torch.bool)
    inside[4, :2] = True  # a beam
    endings = torch.zeros(6, LENGTH)
    endings[2] = endings[5] = float("-inf")
    firsts = torch.tensor([0, 0, 0, 0, positions[4], 0])
    rules = TokenRules.allocate(VOCABULARY, TorchHostMemory())
    rules.write([8], [2], {(5,): 0.5}, [6], [7])
    greedy = tokens.clone()
    settings = penalised, penalty, ngrams, endings, firsts, inside
    result = penalise(scores, tokens, positions, forced, *rules.inputs, *settings, sequences)

    want = scores.clone()
    want[4] = scores[4].log_softmax(-1)
    want[:, 5] += 0.5
    penalise_repetition(want, held, positions, penalty, rules.before)
    ban_repeated_ngrams(want, held, positions, ngrams)
    never = float("-inf")
    want[2, 8] = never
    want[5] = torch.where(torch.arange(VOCABULARY) == 8, 0.0, never)  # forced, though no end may come
    want[:, 6] = want[4, 7] = never
    assert torch.equal(result, want)
    best = want.argmax(dim=1)
    assert tokens.tolist() == [best[0], 4, best[2], greedy[3], greedy[4], 8]
    assert sequences[0, range(6), positions].tolist() == tokens.tolist()
