"""The best tokens of each row, found in parts of a vocabulary, against a sort; and both ways of moving K/V."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapcap.models.layers.choice import _PART, best_log_probs, largest, reorder
from snapcap.models.memory.memory import move_rows

NEVER = float("-inf")
# Of few different values, so that many are equal, or almost none of them finite.
KINDS = ("random", "few values", "mostly excluded", "all excluded", "all equal", "descending", "ascending")


def scores(kind: str, rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(rows, vocabulary, generator=generator)
    return {
        "random": random,
        "few values": random.round(),
        "mostly excluded": random.masked_fill(random < 2.5, NEVER),
        "all excluded": torch.full_like(random, NEVER),
        "all equal": torch.zeros_like(random),
        "descending": random.sort(dim=1, descending=True).values,
        "ascending": random.sort(dim=1).values,
    }[kind]


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 5),
    vocabulary=st.integers(16, 60 * _PART + 1),
    count=st.integers(1, 16),
    seed=st.integers(0, 2**31),
)
def test_the_largest_in_parts_are_those_of_a_sort(
    kind: str, rows: int, vocabulary: int, count: int, seed: int
) -> None:
    given_scores = scores(kind, rows, vocabulary, seed)
    best, ids = largest(given_scores, count)
    assert torch.equal(best, given_scores.sort(dim=1, descending=True).values[:, :count])
    assert torch.equal(given_scores.gather(1, ids), best)
    assert all(len(set(row)) == count for row in ids.tolist()), "no token twice"


@pytest.mark.parametrize("vocabulary", [33 * _PART, 33 * _PART + 1, 34 * _PART - 1])
@pytest.mark.parametrize("place", [0, _PART - 1, _PART, 33 * _PART - 1, -1])
def test_the_best_token_is_found_wherever_it_stands(vocabulary: int, place: int) -> None:
    given_scores = scores("random", 2, vocabulary, 1)
    given_scores[1, place] = 100.0
    assert int(largest(given_scores, 16)[1][1, 0]) == place % vocabulary


@pytest.mark.parametrize("vocabulary", [50, 50 * _PART + 3])
def test_log_probabilities_are_those_of_a_softmax_over_all_tokens(vocabulary: int) -> None:
    logits = 5 * scores("random", 3, vocabulary, 2)
    logits[:, ::7] = NEVER
    logits[1] += 1e4  # no exponent overflows
    values, ids = best_log_probs(logits, torch.tensor([False]), 16)
    torch.testing.assert_close(values, logits.log_softmax(dim=1).gather(1, ids), atol=1e-5, rtol=1e-6)
    penalised, _ = best_log_probs(logits, torch.tensor([True]), 16)
    assert torch.equal(penalised, logits.topk(16).values)


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 6))
def test_both_ways_of_moving_give_each_row_what_its_parent_has_cached(seed: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = 9
    key, value = (torch.randn(2, 7, 3, *shape, generator=generator) for shape in ((4, length), (length, 4)))
    left = torch.rand(rows, generator=generator) < 0.5
    left[0] = True  # a row that is moved from is not moved
    stay = left.nonzero().squeeze(1)
    parents = torch.where(left, torch.arange(rows), stay[torch.randint(0, len(stay), (rows,), generator=generator)])
    positions = torch.full((rows,), int(torch.randint(0, length, (), generator=generator)))
    filled = int(positions[0])
    expected = key[:, parents, ..., :filled].clone(), value[:, parents, :, :filled].clone()
    for host in (False, True):
        ours = key.clone(), value.clone()
        if host:
            move_rows(*(each.numpy() for each in ours), parents.tolist(), positions.tolist())
        else:
            reorder(*ours, parents, positions)
        assert torch.equal(ours[0][:, :rows, ..., :filled], expected[0])
        assert torch.equal(ours[1][:, :rows, :, :filled], expected[1])
        assert torch.equal(ours[0][:, rows:], key[:, rows:])
        assert torch.equal(ours[0][:, stay], key[:, stay])
