"""How many threads decode images, and how many processes."""

import pytest

from service import decode_fork, thread_decoder
from service.decode_fork import decode_processes
from service.thread_decoder import decode_threads


@pytest.mark.parametrize(("asked", "cpus", "threads"), [(0, 2, 2), (0, 8, 8), (0, 64, 8), (1, 64, 1), (24, 2, 24)])
def test_one_for_each_cpu_up_to_eight_unless_asked(
    asked: int, cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_decoder, "available_cpus", lambda: cpus)
    assert decode_threads(asked) == threads


@pytest.mark.parametrize(
    ("asked", "cpus", "processes"),
    [(None, 2, 0), (None, 7, 0), (None, 8, 5), (None, 16, 10), (None, 64, 12), (2, 2, 2), (0, 64, 0)],
)
def test_processes_leave_three_of_eight_cpus_and_need_eight(
    asked: int | None, cpus: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_fork, "available_cpus", lambda: cpus)
    assert decode_processes(asked) == processes
