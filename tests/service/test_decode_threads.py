"""How many threads decode images."""

import pytest

from service import decoding
from service.decoding import decode_threads


@pytest.mark.parametrize(("asked", "cpus", "threads"), [(0, 2, 2), (0, 8, 8), (0, 64, 8), (1, 64, 1), (24, 2, 24)])
def test_one_for_each_cpu_up_to_eight_unless_asked(
    asked: int, cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "available_cpus", lambda: cpus)
    assert decode_threads(asked) == threads
