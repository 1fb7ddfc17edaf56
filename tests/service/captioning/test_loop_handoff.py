"""Results of other threads: the loop is woken once for many, deadlines and cancellations reach the thread."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from snapcap.service.captioning.stream import LoopHandoff, until
from snapcap.service.errors import DeadlineExceeded


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes = 0

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.Handle:
        self.wakes += 1
        return super().call_soon_threadsafe(callback, *args, **kwargs)


def test_a_step_that_ends_many_wakes_the_loop_once() -> None:
    futures: list[Future[int]] = [Future() for _ in range(64)]

    async def scenario() -> tuple[list[int], int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        handoff = LoopHandoff(loop)
        waiting = [asyncio.ensure_future(handoff.result(future)) for future in futures]
        await asyncio.sleep(0)
        device = threading.Thread(target=lambda: [future.set_result(n) for n, future in enumerate(futures)])
        device.start()
        device.join()  # the loop has no turn meanwhile
        return await asyncio.gather(*waiting), loop.wakes

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        results, wakes = runner.run(scenario())
    assert results == list(range(64))
    assert wakes == 1


def test_nothing_that_arrives_is_left_lying() -> None:
    """Threads that put while the loop takes: each call is made, in the order of its thread."""
    taken: list[tuple[int, int]] = []

    async def scenario() -> None:
        handoff = LoopHandoff(asyncio.get_running_loop())

        def put(thread: int) -> None:
            for turn in range(2000):
                handoff.call(partial(taken.append, (thread, turn)))

        threads = [threading.Thread(target=put, args=(each,)) for each in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)

    asyncio.run(scenario())
    for thread in range(3):
        assert [turn for of, turn in taken if of == thread] == list(range(2000))


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    future: Future[int] = Future()
    future.set_exception(KeyError("x"))

    async def scenario() -> int:
        return await LoopHandoff(asyncio.get_running_loop()).result(future)

    with pytest.raises(KeyError):
        asyncio.run(scenario())


def test_the_deadline_withdraws_the_request() -> None:
    future: Future[int] = Future()

    async def scenario() -> int:
        async with until(time.monotonic() + 0.01):
            return await LoopHandoff(asyncio.get_running_loop()).result(future)

    with pytest.raises(DeadlineExceeded):
        asyncio.run(scenario())
    assert future.cancelled()


def test_who_stops_waiting_withdraws_the_request() -> None:
    future: Future[int] = Future()

    async def scenario() -> None:
        task = asyncio.ensure_future(LoopHandoff(asyncio.get_running_loop()).result(future))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(scenario())
    assert future.cancelled()


def test_a_result_for_a_loop_that_is_closed_is_nobodys() -> None:
    loop = asyncio.new_event_loop()
    handoff = LoopHandoff(loop)
    loop.close()
    handoff.call(lambda: None)
