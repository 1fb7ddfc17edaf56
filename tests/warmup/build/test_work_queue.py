"""Work that shares a GPU's memory: what fits begins, and what never fits runs alone."""

import threading
from collections.abc import Callable

from snapcap.warmup.build.builder import Room, WorkQueue


def queue_of(size: int | None, *needs: int) -> WorkQueue[int]:
    queue = WorkQueue(Room(size), lambda need: need)
    for need in needs:
        queue.put(need)
    queue.close()
    return queue


def on_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_small_piece_fills_the_gap_beside_a_large_one() -> None:
    queue = queue_of(10, 7, 8, 3)
    with queue.taken() as first, queue.taken() as second:
        assert (first, second) == (7, 3)


def test_a_piece_that_does_not_fit_waits_until_memory_is_given_back() -> None:
    queue, taken, begun = queue_of(10, 7, 8), list[int | None](), threading.Event()

    def take() -> None:
        begun.set()
        with queue.taken() as piece:
            taken.append(piece)

    with queue.taken():
        thread = on_thread(take)
        assert begun.wait(10)
        assert taken == []
    thread.join(10)
    assert taken == [8]


def test_a_piece_that_is_larger_than_everything_runs_alone() -> None:
    queue = queue_of(10, 50, 1)
    with queue.taken() as large:
        assert large == 50
        thread = on_thread(lambda: queue.taken().__enter__())
        thread.join(0.05)
        assert thread.is_alive(), "nothing runs beside it"
    thread.join(10)
    assert not thread.is_alive()


def test_without_a_limit_everything_runs_at_once() -> None:
    queue = queue_of(None, 5, 6)
    with queue.taken() as first, queue.taken() as second, queue.taken() as none:
        assert (first, second, none) == (5, 6, None)


def test_who_waits_for_a_piece_ends_when_the_work_is_abandoned() -> None:
    queue: WorkQueue[int] = WorkQueue(Room(1), lambda need: need)
    ended = list[int | None]()

    def take() -> None:
        with queue.taken() as piece:
            ended.append(piece)

    thread = on_thread(take)
    queue.abandon()
    thread.join(10)
    assert ended == [None]
