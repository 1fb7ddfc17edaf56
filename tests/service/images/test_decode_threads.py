"""How many threads parse bodies and decode images, and how many processes."""

import pytest

from snapcap.service.images import decode
from snapcap.service.images.decode import decode_processes, decode_threads


@pytest.mark.parametrize(("asked", "cpus", "threads"), [(0, 2, 2), (0, 8, 8), (0, 64, 8), (1, 64, 1), (24, 2, 24)])
def test_one_for_each_cpu_up_to_eight_unless_asked(
    asked: int, cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "available_cpus", lambda: cpus)
    assert decode_threads(asked) == threads


@pytest.mark.parametrize(
    ("asked", "cpus", "processes"),
    [(None, 1, 1), (None, 2, 2), (None, 7, 4), (None, 8, 5), (None, 16, 10), (None, 64, 12), (1, 64, 1), (9, 2, 9)],
)
def test_processes_leave_three_of_eight_cpus_and_are_always_there(
    asked: int | None, cpus: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "available_cpus", lambda: cpus)
    assert decode_processes(asked) == processes
