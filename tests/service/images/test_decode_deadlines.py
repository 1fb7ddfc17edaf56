"""Decode processes that are ended, as the HTTP process does it. They are played by the test, over their sockets."""

import asyncio
import os
from collections.abc import Callable

import pytest
from support.fakes.decode_world import MEMORY, SLOTS, World, killed_for, of, play, turns
from support.fakes.list_engine import PATIENCE
from support.fakes.passing_time import ModuleClock

from snapcap.service.errors import DeadlineExceeded, UnprocessableImage
from snapcap.service.images import pool as process_decoder
from snapcap.service.images import processes as decode_family
from snapcap.service.images.messages import Decoded, Ended, Needs, pack_answer
from snapcap.service.images.pool import ImageRoom
from snapcap.service.ipc import shared_pixels
from snapcap.service.ipc.framing import pack


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were, which the test plays; looked for all the time."""
    pids: list[int] = []
    monkeypatch.setattr(decode_family, "kill", pids.append)
    monkeypatch.setattr(process_decoder, "_LOOK_S", 0.005)
    return pids


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ModuleClock:
    """The time as the decoder and its processes see it."""
    clock = ModuleClock()
    for module in (process_decoder, decode_family):
        monkeypatch.setattr(module, "time", clock)
    return clock


async def until(what: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE / 0.005)):
        if what():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be")


def test_a_late_image_ends_its_process_and_is_not_tried_again(
    killed: list[int], clock: ModuleClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        soon = PATIENCE
        late, waits = await world.ask(1, seconds=soon), [await world.ask(2), await world.ask(3, seconds=soon)]
        (first,) = [each for each in world.working() if (each.job() or b"?")[0] == 1]
        clock.forward(2 * soon)
        await until(waits[1].done)
        assert killed == [first.pid]
        await turns()
        assert isinstance(late.exception(), DeadlineExceeded)
        assert isinstance(waits[1].exception(), DeadlineExceeded), "it was not begun, and does not wait"
        first.answer()  # faster than the signal
        await turns()
        assert len(world.slots) == SLOTS, "none is held by a process"
        world.control.sendall(pack(Ended(first.pid, -9)))
        first.die()
        await turns()
        assert (len(world.working()), len(world.slots)) == (1, SLOTS)
        assert killed_for(world) == {"deadline": 1}
        assert of(world, "decode_process_deaths") == 0
        world.close()

    play(scene())
    # The request of the second image is cancelled when the event loop ends, and its process may be killed then.
    record = next(each for each in caplog.records if each.name == "snapcap.decode")
    fields = record.fields  # type: ignore[attr-defined]
    assert (record.getMessage(), fields["why"]) == (
        "decode process killed",
        "killed at the deadline of its request",
    )
    assert (fields["request_id"], fields["bytes"], fields["format"]) == ("1", 10, "unknown")


def test_an_image_that_takes_too_long_is_refused_for_that(killed: list[int]) -> None:
    async def scene() -> None:
        world = World()
        world.decoder.most_s = 0.0
        await world.begin(1)
        future = await world.ask(1)
        await until(lambda: bool(killed))
        await turns()
        error = future.exception()
        assert isinstance(error, UnprocessableImage)
        assert error.reason == "too_complex"
        world.processes[0].die()
        await turns()
        assert (killed_for(world), len(world.slots)) == ({"too_complex": 1}, SLOTS)
        world.close()

    play(scene())


def test_a_model_may_leave_before_a_process_that_was_killed_has_ended(killed: list[int]) -> None:
    """With a `keep_alive` of 0 a model leaves after a refused image, if the image was its last request. An error
    would keep all processes of the model."""

    async def scene() -> None:
        world = World()
        world.decoder.most_s = 0.0
        await world.begin(1)
        future = await world.ask(1)
        await until(future.done)
        assert killed == [world.processes[0].pid]
        assert isinstance(future.exception(), UnprocessableImage)
        world.decoder.leave()
        assert len(world.slots) == SLOTS
        world.close()

    play(scene())


def test_a_large_image_gets_the_memory_of_a_killed_process_before_that_is_replaced(killed: list[int]) -> None:
    """A replacement may take long to begin, if memory is short."""

    async def scene() -> None:
        world = World()
        await world.begin()
        late, waits = await world.ask(1, seconds=1.0), await world.ask(2)
        for process in sorted(world.working(), key=lambda each: each.job() or b""):
            process.answer(Needs(MEMORY // 2))
            await turns()
        (large,) = world.working()
        assert (large.job() or b"?")[0] == 1, "another large image waits for its memory"
        await until(lambda: bool(killed))
        await turns()
        assert late.done()
        large.die()
        await turns()
        (other,) = world.working()
        assert (other.job() or b"?")[0] == 2
        waits.cancel()
        world.close()

    play(scene())


def test_a_large_image_whose_client_left_holds_up_no_smaller_one(killed: list[int]) -> None:
    async def scene() -> None:
        world = World()
        world.decoder.room = ImageRoom(MEMORY, 3)
        await world.begin(3)
        half, whole = world.decoder.room.most // 2, world.decoder.room.most
        asked = []
        for value, size in ((1, half), (2, whole), (3, half)):
            asked.append(await world.ask(value))
            (process,) = [each for each in world.working() if (each.job() or b"?")[0] == value]
            process.answer(Needs(size))
            await turns()
        assert [(each.job() or b"?")[0] for each in world.working()] == [1]
        asked[1].cancel()
        await until(lambda: len(world.working()) == 2)
        for each in asked:
            each.cancel()
        world.close()

    play(scene())


def test_a_process_whose_client_left_may_come_to_its_end_but_not_for_long(
    killed: list[int], clock: ModuleClock
) -> None:
    async def scene() -> None:
        world = World()
        await world.begin(1)
        (await world.ask(1)).cancel()
        clock.forward(decode_family.LEFT_S / 2)
        await asyncio.sleep(0.05)
        assert killed == []
        clock.forward(decode_family.LEFT_S)
        await until(lambda: bool(killed))
        assert killed_for(world) == {"client_left": 1}
        world.processes[0].die()
        await turns()
        assert len(world.slots) == SLOTS
        world.close()

    play(scene())


def test_a_process_that_does_nothing_is_replaced_and_its_image_tried_again(
    killed: list[int], clock: ModuleClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        clocks = {each.pid: 0.0 for each in world.processes}
        monkeypatch.setattr(decode_family, "cpu_seconds", clocks.get)
        future = await world.ask(1)
        (hung,) = world.working()
        for _ in range(10):
            clocks[hung.pid] += 0.01
            clock.forward(decode_family.HUNG_S / 2)
            await asyncio.sleep(0.02)
        assert killed == [], "it works"
        clock.forward(2 * decode_family.HUNG_S)
        await until(lambda: bool(killed))
        hung.die()
        await turns()
        (other,) = world.working()
        assert (other.job() or b"?")[0] == 1
        other.answer()
        await turns()
        assert not future.done()  # it waits for the engine
        assert killed_for(world) == {"hung": 1}
        world.close()

    play(scene())


@pytest.mark.parametrize("used", ["cpu_seconds", "kept_bytes"])
def test_a_process_that_works_without_an_image_is_replaced(
    used: str, killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU time and memory that a process uses while it has an image do not count."""

    async def scene() -> None:
        world = World()
        amounts = dict.fromkeys(range(1_000_000_000, 1_000_000_004), 0)
        monkeypatch.setattr(decode_family, used, amounts.get)
        await world.begin()
        await world.ask(1)
        (worker,) = world.working()
        if used == "cpu_seconds":
            amounts[worker.pid] = 1 << 30
        worker.answer()
        await asyncio.sleep(0.1)
        assert killed == []
        amounts[worker.pid] += 1 << 30
        await until(lambda: bool(killed))
        assert killed == [worker.pid]
        await world.ask(2)
        await turns()
        (other,) = world.working()
        assert other is not worker
        assert killed_for(world) == {"idle": 1}
        world.close()

    monkeypatch.setattr(process_decoder, "_IDLE_LOOK_S", 0.01)
    play(scene())


@pytest.mark.parametrize("bad", ["half an image", "nonsense", "needs what it has", "unasked"])
def test_a_process_that_says_what_none_says_is_killed(
    bad: str, killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_pixels, "seal", lambda file: None)  # as where a temporary folder has the file

    async def scene() -> None:
        world = World()
        await world.begin(1)
        (process,) = world.processes
        future = await world.ask(1) if bad != "unasked" else None
        if bad == "half an image":
            os.ftruncate(process.file, 6)
            process.end.sendall(pack_answer(Decoded("png", 1.0, 0.5, (3, 2))))
        elif bad == "needs what it has":
            process.answer(Needs(MEMORY // 4))
        else:
            process.end.sendall(b"\x80\x05\x95" + bytes(200))  # as a pickle begins
        await turns()
        assert killed == [process.pid]
        process.die()
        await turns()
        assert killed_for(world) == {"bad_answer": 1}
        if future is not None:
            world.add()
            await turns()
            world.processes[-1].answer()
            await turns()
            assert [int(each.request_id) for each in world.submitted] == [1]
            assert len(world.slots) == SLOTS - 1
        world.close()

    play(scene())
