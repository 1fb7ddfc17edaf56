"""Slots that are copied at once."""

import pytest

from snapcap.models.memory.memory import runs


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        ([], [], []),
        ([7], [2], [(7, 2, 1)]),
        ([8, 9, 10], [0, 1, 2], [(8, 0, 3)]),
        ([8, 9, 11, 12], [0, 1, 2, 3], [(8, 0, 2), (11, 2, 2)]),
        ([8, 9, 10], [0, 2, 3], [(8, 0, 1), (9, 2, 2)]),
        ([4, 4, 4], [5, 6, 7], [(4, 5, 1), (4, 6, 1), (4, 7, 1)]),
        ([9, 8], [0, 1], [(9, 0, 1), (8, 1, 1)]),
    ],
)
def test_runs(sources: list[int], targets: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert list(runs(sources, targets)) == expected
