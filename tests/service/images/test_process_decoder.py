"""Decoding in processes as the HTTP process drives it. The processes are played by the test, over their sockets."""

import pytest
from support.fakes.decode_world import COMPLETION, MEMORY, SLOTS, World, of, play, turns

from snapcap.service.engine.remote.messages import Turn
from snapcap.service.errors import UnprocessableImage
from snapcap.service.images.messages import Answer, Broken, Ended, Needs, Refused
from snapcap.service.images.pool import ImageProcessError
from snapcap.service.ipc.framing import pack
from snapcap.service.limits import ImageMemoryFull


def test_an_image_goes_to_a_process_and_its_slot_to_the_engine() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        future = await world.ask(9)
        (process,) = world.working()
        assert process.job() == bytes([9]) * 10
        process.answer()
        await turns()
        (message,) = world.submitted
        assert (world.pixels.read(message.slot) == 9).all()
        assert len(world.slots) == SLOTS - 1
        world.engine.take(Turn.of()._replace(admitted=[message.number], completed=[(message.number, COMPLETION)]))
        await turns()
        assert future.result().tokens == len(COMPLETION.tokens)
        assert len(world.slots) == SLOTS
        world.close()

    play(scene())


class Panic(BaseException):
    """As tokenizers' PanicException, which is no Exception."""


@pytest.mark.parametrize("error", [Panic("a panic"), ValueError("a mistake")], ids=["panic", "error"])
def test_whatever_is_raised_while_an_image_is_handed_on_costs_its_request_alone(error: BaseException) -> None:
    """Its slot and its process are there for the next."""

    async def scene() -> None:
        world = World()
        await world.begin()
        for _ in range(3 * SLOTS):
            future = await world.ask(7, raises=error)
            for process in world.working():
                process.answer()
            await turns()
            assert future.exception() is error
            assert len(world.slots) == SLOTS
        await world.ask(9)
        (process,) = world.working()
        process.answer()
        await turns()
        assert len(world.submitted) == 1
        world.close()

    play(scene())


@pytest.mark.parametrize("answer", [None, Broken("ZeroDivisionError")], ids=["pixels", "error"])
def test_an_answer_for_a_client_that_leaves_in_the_same_turn_frees_its_slot(answer: Answer | None) -> None:
    async def scene() -> None:
        world = World()
        await world.begin(1)
        future = await world.ask(9)
        (process,), (worker,) = world.working(), world.decoder.family.workers
        process.answer(answer)
        worker._receive()  # the request has its outcome, and has not run yet
        assert (len(world.slots), future.done()) == (SLOTS - (answer is None), False)
        future.cancel()
        await turns()
        assert (len(world.slots), future.cancelled(), world.submitted) == (SLOTS, True, [])
        world.close()

    play(scene())


def test_images_wait_in_order_and_those_whose_clients_left_are_not_begun() -> None:
    async def scene() -> None:
        world = World()
        await world.begin(1)
        futures = [await world.ask(value) for value in range(1, 5)]
        futures[1].cancel()
        (process,) = world.processes
        seen = []
        for _ in range(3):
            await turns()
            seen.append((process.job() or b"?")[0])
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
        await world.ask(5, size=9_000_000)  # returns, though nobody reads yet
        await world.ask(6)
        (process,) = world.processes
        for _ in range(1000):
            await turns()
            if (job := process.job()) is not None:
                break
        assert job is not None
        assert job == bytes([5]) * 9_000_000
        process.answer()
        await turns()
        assert process.job() == bytes([6]) * 10
        (worker,) = world.decoder.family.workers
        assert len(worker._rest.obj) == 0, "the image is not held any longer"
        world.close()

    play(scene())


def test_errors_are_those_of_decoding_in_this_process() -> None:
    async def scene() -> None:
        world = World()
        await world.begin(1)
        refused, broken = await world.ask(1), await world.ask(2)
        world.processes[0].answer(Refused("truncated", "the PNG data is incomplete"))
        await turns()
        world.processes[0].answer(Broken("Traceback\nZeroDivisionError"))
        await turns()
        error = refused.exception()
        assert isinstance(error, UnprocessableImage)
        assert (error.detail, error.reason) == ("The PNG data is incomplete.", "truncated")
        assert isinstance(broken.exception(), ImageProcessError)
        assert "ZeroDivisionError" in str(broken.exception())
        assert world.metrics.image_decode_failures.labels("truncated")._value.get() == 1
        assert len(world.slots) == SLOTS
        world.close()

    play(scene())


def test_what_a_process_had_when_it_died_goes_to_an_idle_one_at_once() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        await world.ask(1)
        (killed,) = world.working()
        killed.die()
        await turns()
        (other,) = world.working()
        assert (other.job() or b"?")[0] == 1
        world.close()

    play(scene())


def test_what_a_process_had_when_it_died_is_tried_once_more_and_then_refused() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        good, bad = await world.ask(1), await world.ask(2)
        (killed,) = [each for each in world.working() if (each.job() or b"?")[0] == 2]
        killed.die()
        await turns()
        assert (of(world, "decode_processes"), of(world, "decode_process_deaths")) == (1, 1)
        (other,) = world.working()
        other.answer()
        await turns()
        assert not good.done()  # it waits for the engine
        assert [int(each.request_id) for each in world.submitted] == [1]
        assert (other.job() or b"?")[0] == 2
        other.die()
        await turns()
        error = bad.exception()
        assert isinstance(error, UnprocessableImage)
        assert (error.status, error.reason) == (422, "crashed")
        world.add()
        await world.ask(3)
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
        future = await world.ask(1)  # before their ends were heard
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


def test_an_image_that_takes_more_than_a_share_waits_for_the_rest() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        futures = [await world.ask(value) for value in (1, 2)]
        for process in world.working():
            assert process.room == MEMORY // 4
            process.answer(Needs(1800))
        await turns()
        (process,) = world.working()
        assert process.room == 1800, "one at a time: a process is for the others"
        futures.append(await world.ask(3))
        (other,) = [each for each in world.working() if each is not process]
        assert (other.room, (other.job() or b"?")[0]) == (MEMORY // 4, 3)
        other.answer()
        process.answer()
        await turns()
        (process,) = world.working()
        assert process.room == 1800
        process.answer()
        await turns()
        assert sorted(int(each.request_id) for each in world.submitted) == [1, 2, 3]
        assert not any(each.done() for each in futures)
        world.close()

    play(scene())


def test_the_memory_of_a_process_that_died_is_there_again() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        for _ in range(3):
            future = await world.ask(1)
            world.working()[0].answer(Needs(2000))
            await turns()
            for _ in range(2):
                world.working()[0].die()
                world.add()
                await turns()
            assert isinstance(future.exception(), UnprocessableImage)
        assert (world.decoder.room._taken, world.decoder.room._takers, len(world.slots)) == (0, 0, SLOTS)
        world.close()

    play(scene())


def test_what_no_room_is_enough_for_is_refused_and_too_many_that_wait_are_for_later() -> None:
    async def scene() -> None:
        world = World()
        await world.begin()
        future = await world.ask(1)
        world.working()[0].answer(Needs(2001))
        await turns()
        error = future.exception()
        assert isinstance(error, UnprocessableImage)
        assert (error.status, error.reason) == (422, "too_large")
        waiting = [await world.ask(2)]
        while not any(each.done() for each in waiting):
            process = next(each for each in world.working() if each.room == MEMORY // 4)
            process.answer(Needs(2000))
            await turns()
            waiting.append(await world.ask(2))
        (refused,) = [each for each in waiting if each.done()]
        assert isinstance(refused.exception(), ImageMemoryFull)
        assert len(waiting) > 10
        world.close()

    play(scene())
