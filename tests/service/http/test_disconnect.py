"""Work whose client leaves: before its end, as it ends, and where it will not be stopped."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from snapcap.service.errors import ClientDisconnected
from snapcap.service.http.replies import unless_disconnected

Future = asyncio.Future[Any]


def run(scenario: Callable[[Future, Future], Awaitable[None]]) -> None:
    """`scenario(result, leaving)`: the work's result, and the next message of the client."""

    async def body() -> None:
        loop = asyncio.get_running_loop()
        await scenario(loop.create_future(), loop.create_future())

    asyncio.run(body())


def of_client(leaving: Future) -> Callable[[], Awaitable[Any]]:
    async def receive() -> Any:
        return await leaving

    return receive


async def wait_for(future: Future) -> Any:
    return await future


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_after_it(fails: bool) -> None:
    async def scenario(result: Future, leaving: Future) -> None:
        loop = asyncio.get_running_loop()

        def both() -> None:
            # The watcher ends in the turn of the loop in which the work's task is woken, and before it: what it
            # does when it is done has its turn after the work has returned.
            leaving.set_result({"type": "http.disconnect"})
            if fails:
                result.set_exception(KeyError("of the work"))
            else:
                result.set_result("done")

        loop.call_soon(both)
        try:
            assert await unless_disconnected(of_client(leaving), wait_for(result)) == "done"
        except KeyError:
            assert fails
        for _ in range(5):
            await asyncio.sleep(0)  # the reply is sent
        assert cancelling() == 0

    run(scenario)


def test_work_that_ends_although_it_is_cancelled_leaves_no_cancellation_behind() -> None:
    async def stubborn(result: Future) -> str:
        try:
            await result
        except asyncio.CancelledError:
            return "done anyway"
        raise AssertionError

    async def scenario(result: Future, leaving: Future) -> None:
        leaving.set_result({"type": "http.disconnect"})
        assert await unless_disconnected(of_client(leaving), stubborn(result)) == "done anyway"
        assert cancelling() == 0
        await asyncio.sleep(0)

    run(scenario)


def test_a_client_that_leaves_stops_the_work() -> None:
    async def scenario(result: Future, leaving: Future) -> None:
        asyncio.get_running_loop().call_soon(leaving.set_result, {"type": "http.disconnect"})
        with pytest.raises(ClientDisconnected):
            await unless_disconnected(of_client(leaving), wait_for(result))
        assert result.cancelled()
        assert cancelling() == 0

    run(scenario)


def test_a_task_that_somebody_else_cancels_as_well_stays_cancelled() -> None:
    async def scenario(result: Future, leaving: Future) -> None:
        task = asyncio.ensure_future(unless_disconnected(of_client(leaving), wait_for(result)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.set_result({"type": "http.disconnect"})
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario)
