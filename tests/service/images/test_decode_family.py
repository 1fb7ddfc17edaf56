"""The end of all decode processes, or of their parent, as the HTTP process follows it. The test plays them."""

import asyncio
import time

import pytest
from support.fakes.decode_world import MEMORY, SLOTS, World, killed_for, play, turns
from support.fakes.list_engine import PATIENCE

from snapcap.benchmarks.harness.processes import is_gone
from snapcap.models.errors import UserError
from snapcap.models.processing.transform import ImageTransform
from snapcap.service.errors import NotReady, UnprocessableImage
from snapcap.service.images import pool as process_decoder
from snapcap.service.images import processes as decode_family
from snapcap.service.images.messages import Answer, Broken, Ended, Needs, NoneBegan, Refused
from snapcap.service.images.parent import picture
from snapcap.service.ipc.framing import pack


def test_without_their_parent_the_server_ends_and_nothing_waits() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        futures = [await world.ask(value) for value in (1, 2, 3)]
        world.parent.kill()
        world.control.close()
        await turns()
        assert isinstance(futures[2].exception(), NotReady), "it was not begun"
        for each in world.processes:
            each.die()
        await turns()
        futures.append(await world.ask(4))
        assert all(isinstance(each.exception(), NotReady) for each in futures)
        (error,) = world.failures
        assert isinstance(error, UserError)
        assert str(error).endswith("the parent of the decode processes has ended")
        assert len(world.slots) == SLOTS
        world.close()

    play(scene())


def test_a_parent_that_does_not_replace_one_that_died_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_family, "SILENT_S", 0.2)
    monkeypatch.setattr(process_decoder, "_LOOK_S", 0.01)

    async def scene() -> None:
        world = World()
        await world.begin()
        world.processes[0].die()
        await turns()
        for _ in range(10):  # it says that it cannot start one: there is another, which goes on
            world.control.sendall(pack(NoneBegan(12)))
            await asyncio.sleep(0.03)
        assert world.failures == []
        while not world.failures:  # noqa: ASYNC110  a list says nothing when it grows
            await asyncio.sleep(0.01)
        (error,) = world.failures
        assert "has done nothing for" in str(error)
        assert world.parent.poll() is not None or is_gone(world.parent.pid)
        world.close()

    play(asyncio.wait_for(scene(), PATIENCE))


def test_a_loop_that_stood_still_has_not_waited_for_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_family, "SILENT_S", 0.2)
    monkeypatch.setattr(process_decoder, "_LOOK_S", 0.01)

    async def scene() -> None:
        world = World()
        await world.begin()
        world.processes[0].die()
        await turns()
        time.sleep(0.5)  # noqa: ASYNC251  as a container that is paused
        await asyncio.sleep(0.03)
        assert world.failures == []
        world.close()

    play(scene())


def test_where_none_can_be_started_any_more_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_family, "START_S", 0.2)
    monkeypatch.setattr(process_decoder, "_LOOK_S", 0.01)

    async def scene() -> None:
        world = World()
        await world.begin(1)
        future = await world.ask(1)
        world.processes[0].die()
        while not world.failures:
            world.control.sendall(pack(NoneBegan(12)))
            await asyncio.sleep(0.01)
        await turns()
        assert "no process could be started" in str(world.failures[0])
        assert isinstance(future.exception(), NotReady)
        world.close()

    play(asyncio.wait_for(scene(), PATIENCE))


def test_processes_that_never_come_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        world = World()
        monkeypatch.setattr(decode_family, "START_S", 0.01)
        assert not await asyncio.to_thread(world.decoder.begin, ImageTransform((2, 2)))
        await turns()
        assert isinstance(world.failures[0], UserError)
        assert isinstance((await world.ask(1)).exception(), NotReady)
        world.close()

    play(scene())


def test_a_process_whose_child_keeps_its_socket_has_ended_when_its_parent_says_so() -> None:
    """An image that took the process over may fork a child, so that no end of file comes."""

    async def scene() -> None:
        world = World()
        await world.begin(1)
        for value in range(1, 2 * SLOTS):
            future = await world.ask(value)
            (process,) = world.working()
            world.control.sendall(pack(Ended(process.pid, 0)))
            await turns()
            assert not world.decoder.family.workers
            world.add()
            await turns()
            world.processes[-1].answer()
            await turns()
            assert [int(each.request_id) for each in world.submitted][-1] == value
            future.cancel()
            process.die()
            await turns()
        assert len(world.slots) == SLOTS
        assert world.failures == []
        world.close()

    play(scene())


def test_a_process_that_closes_its_socket_and_goes_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_family, "_GOES_ON_S", 0.2)
    monkeypatch.setattr(process_decoder, "_LOOK_S", 0.01)
    killed: list[int] = []
    monkeypatch.setattr(decode_family, "kill", killed.append)

    async def scene() -> None:
        world = World()
        await world.begin()
        gone, ended = world.processes
        for each in (gone, ended):
            each.die()
        await turns()
        world.control.sendall(pack(Ended(ended.pid, -11)))
        while not killed:
            world.control.sendall(pack(NoneBegan(12)))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert killed == [gone.pid], "once, and not the number of one that has ended, which may be another's"
        world.close()

    play(asyncio.wait_for(scene(), PATIENCE))


@pytest.mark.parametrize("well", [True, False])
def test_when_images_of_several_requests_end_their_processes_the_servers_own_is_tried(well: bool) -> None:
    """Whoever sends such images cannot end the server; a server that can decode nothing does not go on."""

    async def scene() -> None:
        world = World()
        await world.begin(1)

        async def crash() -> None:
            for _ in range(2):
                await turns()
                world.processes[-1].die()
                world.add()
            await turns()

        for value in range(1, 4):
            assert picture() != world.processes[-1].job()
            future = await world.ask(value)
            await crash()
            assert isinstance(future.exception(), UnprocessableImage)
        await turns()
        assert world.processes[-1].job() == picture()
        if well:
            world.processes[-1].answer()
            await turns()
            assert world.failures == []
            await world.ask(9)
            await turns()
            world.processes[-1].answer()
            await turns()
            assert [int(each.request_id) for each in world.submitted] == [9]
            assert len(world.slots) == SLOTS - 1
        else:
            await crash()
            (error,) = world.failures
            assert "the server's own picture cannot be decoded either" in str(error)
        world.close()

    play(scene())


async def fail(world: World, answer: Answer) -> None:
    """Has one more picture answered like this; a process that is killed for it ends and is replaced."""
    await world.ask(7)
    await turns()
    (worker,) = world.working()
    worker.answer(answer)
    await turns()
    if isinstance(answer, Broken):
        worker.die()
        await turns()
        world.add()
        await turns()


@pytest.mark.parametrize(
    ("answer", "ends"),
    [(None, False), (Refused("truncated", "It is damaged."), True), (Broken("ZeroDivisionError"), True)],
    ids=["decoded", "refused", "broken"],
)
def test_a_process_that_no_image_reached_tries_the_servers_own(answer: Answer | None, ends: bool) -> None:
    """A process that was taken over could fail it on purpose, and would end the server."""

    async def scene() -> None:
        world = World()
        await world.begin()
        for _ in range(2):
            await fail(world, Broken("ZeroDivisionError"))
            await fail(world, Refused("truncated", "Text in between changes nothing."))
        assert [each.job() for each in world.working()] == []
        await fail(world, Broken("ZeroDivisionError"))
        (new,) = world.working()
        assert new is world.processes[-1]
        assert new.job() == picture()
        new.answer(answer)
        await turns()
        assert bool(world.failures) == ends
        assert killed_for(world) == {"broken": 3}
        world.close()

    play(scene())


@pytest.mark.parametrize("ends", [False, True])
def test_when_every_image_is_refused_the_servers_own_is_tried(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process, and not again for a minute: some clients send nothing but damaged images."""
    damaged = Refused("truncated", "It is damaged.")

    async def scene() -> None:
        world = World()
        await world.begin()

        async def refuse(count: int) -> None:
            for _ in range(count):
                await fail(world, damaged)

        await refuse(3)
        await world.ask(7)
        await turns()
        world.working()[0].answer()  # one that is decoded: they are counted anew
        await turns()
        await refuse(4)
        assert killed_for(world) == {}
        await world.ask(7)
        await turns()
        (worker,) = world.working()
        worker.answer(damaged)
        await turns()
        assert killed_for(world) == {"refusals": 1}
        worker.die()
        await turns()
        assert world.working() == []
        world.add()
        await turns()
        (new,) = world.working()
        assert new is world.processes[-1]
        assert new.job() == picture()
        new.answer(damaged if ends else None)
        await turns()
        assert bool(world.failures) == ends
        if not ends:
            await refuse(20)
            assert killed_for(world) == {"refusals": 1}
            assert len(world.slots) == SLOTS - 1
        world.close()

    monkeypatch.setattr(process_decoder, "_REFUSALS", 5)
    play(scene())


def test_images_that_end_every_process_do_not_end_a_server_that_replaces_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_family, "START_S", 0.3)
    monkeypatch.setattr(process_decoder, "_LOOK_S", 0.01)

    async def scene() -> None:
        world = World()
        await world.begin()
        for _ in range(20):
            for each in world.processes:
                each.die()
            await asyncio.sleep(0.02)
            world.add()
            await asyncio.sleep(0.02)
        assert world.failures == []
        world.processes[-1].die()
        while not world.failures:
            world.control.sendall(pack(NoneBegan(12)))
            await asyncio.sleep(0.02)
        assert "no process could be started" in str(world.failures[0])
        world.close()

    play(asyncio.wait_for(scene(), PATIENCE))


def test_a_process_that_asks_for_memory_twice_is_killed() -> None:
    async def scene() -> None:
        world = World()
        await world.begin(1)
        await world.ask(7)
        await turns()
        (worker,) = world.processes
        worker.answer(Needs(MEMORY // 2 - 1))
        await turns()
        worker.answer(Needs(MEMORY // 2))
        await turns()
        assert killed_for(world) == {"bad_answer": 1}
        world.close()

    play(scene())
