"""Decoding in processes as the HTTP process drives it. The processes are played by the test, over their sockets."""

import asyncio

import pytest
from support.decode_world import COMPLETION, SLOTS, World, of, play, turns
from support.list_engine import PATIENCE

from models.preprocess import ImageTransform
from service import process_decoder
from service.decode_messages import Broken, Ended, Refused
from service.errors import UnprocessableImage
from service.messages import Turn, pack
from service.process_decoder import DecodeError


def test_an_image_goes_to_a_process_and_its_slot_to_the_engine() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        future = world.ask(9)
        (process,) = world.working()
        assert (process.job() or (0, b""))[1] == bytes([9]) * 10
        process.answer()
        await turns()
        (message,) = world.submitted
        assert (world.pixels.read(message.slot) == 9).all()
        assert len(world.slots) == SLOTS - 1
        world.engine.take(Turn.of()._replace(admitted=[message.number], completed=[(message.number, COMPLETION)]))
        assert future.result(0) == COMPLETION
        assert len(world.slots) == SLOTS
        world.close()

    play(scene())


def test_images_wait_in_order_and_those_whose_clients_left_are_not_begun() -> None:
    async def scene() -> None:
        world = World()
        await world.begin(1)
        futures = [world.ask(value) for value in range(1, 5)]
        futures[1].cancel()
        (process,) = world.processes
        seen = []
        for _ in range(3):
            await turns()
            seen.append((process.job() or (0, b"?"))[1][0])
            process.answer()
        await turns()
        assert seen == [1, 3, 4]
        assert [int(each.request_id) for each in world.submitted] == [1, 3, 4]
        world.close()

    play(scene())


def test_an_image_that_the_socket_has_no_room_for_does_not_hold_the_loop() -> None:
    async def scene() -> None:
        world = World()
        await world.begin(1)
        world.ask(5, size=9_000_000)  # returns, though nobody reads yet
        world.ask(6)
        (process,) = world.processes
        for _ in range(1000):
            await turns()
            if (job := process.job()) is not None:
                break
        assert job is not None
        assert job[1] == bytes([5]) * 9_000_000
        process.answer()
        await turns()
        assert (process.job() or (0, b""))[1] == bytes([6]) * 10
        (worker,) = world.decoder._workers
        assert len(worker.channel._rest.obj) == 0, "the image is not held any longer"
        world.close()

    play(scene())


def test_errors_are_those_of_decoding_in_this_process() -> None:
    async def scene() -> None:
        world = World()
        await world.begin(1)
        refused, broken = world.ask(1), world.ask(2)
        world.processes[0].answer(Refused("truncated", "the PNG data is incomplete"))
        await turns()
        world.processes[0].answer(Broken("Traceback\nZeroDivisionError"))
        await turns()
        error = refused.exception(0)
        assert isinstance(error, UnprocessableImage)
        assert (error.detail, error.reason) == ("The PNG data is incomplete.", "truncated")
        assert isinstance(broken.exception(0), DecodeError)
        assert "ZeroDivisionError" in str(broken.exception(0))
        assert world.metrics.image_decode_failures.labels("truncated")._value.get() == 1
        assert len(world.slots) == SLOTS
        world.close()

    play(scene())


def test_what_a_process_had_when_it_died_goes_to_an_idle_one_at_once() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        world.ask(1)
        (killed,) = world.working()
        killed.die()
        await turns()
        (other,) = world.working()
        assert (other.job() or (0, b"?"))[1][0] == 1
        world.close()

    play(scene())


def test_what_a_process_had_when_it_died_is_tried_once_more_and_then_refused() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        good, bad = world.ask(1), world.ask(2)
        (killed,) = [each for each in world.working() if (each.job() or (0, b"?"))[1][0] == 2]
        killed.die()
        await turns()
        assert (of(world, "decode_processes"), of(world, "decode_process_deaths")) == (1, 1)
        (other,) = world.working()
        other.answer()
        await turns()
        assert not good.done()  # it waits for the engine
        assert [int(each.request_id) for each in world.submitted] == [1]
        assert (other.job() or (0, b"?"))[1][0] == 2
        other.die()
        await turns()
        error = bad.exception(0)
        assert isinstance(error, UnprocessableImage)
        assert (error.status, error.reason) == (422, "crashed")
        world.add()
        world.ask(3)
        await turns()
        world.processes[-1].answer()
        await turns()
        assert [int(each.request_id) for each in world.submitted] == [1, 3]
        assert len(world.slots) == SLOTS - 2
        world.close()

    play(scene())


def test_processes_that_died_idle_cost_no_image_an_attempt(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        for each in world.processes:
            each.die()
        future = world.ask(1)  # before their ends were heard
        world.control.sendall(pack(Ended(7, -9)))
        world.add()
        await turns()
        world.processes[-1].answer()
        await turns()
        assert [int(each.request_id) for each in world.submitted] == [1]
        assert not future.done()
        assert len(world.slots) == SLOTS - 1
        world.close()

    play(scene())
    (record,) = [each for each in caplog.records if each.getMessage() == "decode process ended"]
    assert "SIGKILL" in record.fields["how"]  # type: ignore[attr-defined]


def test_without_their_parent_threads_decode(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        first, second, third = (world.ask(value) for value in (1, 2, 3))
        world.parent.kill()
        world.control.close()
        for each in world.processes:
            each.die()
        await turns()
        world.ask(4)
        assert sorted(image[0] for image in world.threads.images) == [1, 2, 3, 4]
        assert not any(each.done() and each.exception(0) for each in (first, second, third))
        assert of(world, "decode_processes") == 0
        assert len(world.slots) == SLOTS - 4  # of those that wait for the engine
        world.close()

    play(scene())
    assert "threads decode from now on" in caplog.text


def test_a_process_that_outlives_their_parent_is_given_no_more() -> None:
    async def scene() -> None:
        world = World()
        await world.begin(1)
        world.ask(1)
        await turns()
        (process,) = world.working()
        world.parent.kill()
        world.control.close()
        await turns()
        process.answer()
        await turns()
        world.ask(2)
        await turns()
        assert [image[0] for image in world.threads.images] == [2]
        assert process.job() is None
        world.close()

    play(scene())


def test_a_process_that_is_stuck_is_killed_while_images_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    async def scene() -> None:
        heard = asyncio.Event()

        def kill(pid: int) -> None:
            killed.append(pid)
            heard.set()

        monkeypatch.setattr(process_decoder, "_kill", kill)
        monkeypatch.setattr(process_decoder, "_LOOK_S", 0.001)
        world = World()
        await world.begin(1)
        world.ask(1)
        world.ask(2)
        await asyncio.sleep(0.02)
        assert killed == []
        monkeypatch.setattr(process_decoder, "STUCK_S", -1.0)
        await heard.wait()  # though nobody asks: the queue may be full
        assert set(killed) == {world.processes[0].pid}
        world.processes[0].answer()
        await turns()
        killed.clear()
        await asyncio.sleep(0.02)
        assert killed == [], "nothing waits"
        world.close()

    play(asyncio.wait_for(scene(), PATIENCE))


def test_processes_that_never_come_leave_it_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        world = World()
        monkeypatch.setattr(process_decoder, "_START_S", 0.01)
        await asyncio.to_thread(world.decoder.begin, ImageTransform((2, 2)), world.threads)
        await turns()
        world.ask(1)
        assert world.threads.images == [bytes([1]) * 10]
        world.close()

    play(scene())
