"""Decoding in processes as the HTTP process drives it. The processes are played by the test, over their sockets."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from support.list_engine import LIMITS, PATIENCE, Observer

from models.preprocess import ImageTransform
from service import process_decoder
from service.caption_options import CaptionOptions
from service.child_process import ChildProcess
from service.decode_fork import DecodeProcesses
from service.decode_messages import HEAD, Began, Broken, Decoded, Ended, Refused, Setup
from service.decoder import Picture
from service.decoding import Decoding, Prepared
from service.errors import EngineFailed, Overloaded, UnprocessableImage
from service.messages import Cancel, Submit, Turn, Unpacker, pack
from service.metrics import Metrics
from service.process_decoder import DecodeError, ProcessDecoder
from service.remote_engine import RemoteEngine
from service.request import CaptionRequest, Completion, SamplingParams
from service.shared_pixels import SharedPixels, Slots

QUEUE, PROCESSES = 4, 2
SLOTS = QUEUE + 2 * PROCESSES
COMPLETION = Completion((7,), "stop", "aot", 0.1, 0.2, 0.3)


class Played:
    """A decode process as the test plays it."""

    def __init__(self, pid: int, end: socket.socket, pixels: SharedPixels) -> None:
        end.setblocking(False)
        self.pid, self.end, self._pixels = pid, end, pixels
        self._held = b""

    def job(self) -> tuple[int, bytes] | None:
        """The slot and the image that it has, once they have all come."""
        with suppress(BlockingIOError):
            while data := self.end.recv(1 << 20):
                self._held += data
        if len(self._held) < HEAD.size:
            return None
        slot, length = HEAD.unpack_from(self._held)
        image = self._held[HEAD.size :]
        return (slot, image) if len(image) == length else None

    def answer(self, answer: Decoded | Refused | Broken | None = None) -> None:
        """By default that the image is decoded: its pixels are all its first byte."""
        job = self.job()
        assert job is not None
        if answer is None:
            self._pixels.read(job[0])[:] = job[1][0]
        self._held = b""
        self.end.sendall(pack(answer or Decoded("png", 1.0, 0.5)))

    def die(self) -> None:
        self.end.close()


class Threads:
    """Instead of the threads that decode."""

    def __init__(self) -> None:
        self.images: list[bytes] = []

    def decode(self, image: bytes, left: Any, done: Any) -> None:
        self.images.append(image)
        done(Picture(image[0], "png", 0.0, 0.0))  # type: ignore[arg-type]


class World:
    """The decoder, what is behind it and what asks it, on the event loop of the test."""

    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.pixels, self.slots = SharedPixels(SLOTS), Slots(SLOTS)
        self.pixels.open((2, 2))
        self.messages: list[Any] = []
        self.engine = RemoteEngine(LIMITS, self.pixels, self.slots, QUEUE, self.messages.append, Observer())
        ours, self.control = socket.socketpair()
        # To be waited for at the end, as the process that forks the others is.
        self.parent = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=-1)
        processes = DecodeProcesses(PROCESSES, ChildProcess(self.parent.pid, ours))
        self.decoder = ProcessDecoder(processes, self.slots, self.metrics, asyncio.get_running_loop())
        self.threads = Threads()
        self.decoding = Decoding(100, self.metrics)
        self.processes: list[Played] = []

    async def begin(self, count: int = PROCESSES) -> None:
        starting = asyncio.create_task(asyncio.to_thread(self.decoder.begin, ImageTransform((2, 2)), self.threads))
        setups = Unpacker[Setup]().feed(await asyncio.to_thread(self.control.recv, 1 << 16))
        assert [type(each) for each in setups] == [Setup]
        for _ in range(count):
            self.add()
        await starting
        await turns()

    def add(self) -> None:
        ours, theirs = socket.socketpair()
        number = 1_000_000_000 + len(self.processes)  # above what a system gives
        socket.send_fds(self.control, [pack(Began(number))], [ours.fileno()])
        ours.close()
        self.processes.append(Played(number, theirs, self.pixels))

    def ask(self, value: int, size: int = 10) -> "Future[Any]":
        """Decode an image whose pixels will all be of this value, and submit it."""
        future: Future[Any] = Future()

        def submit(prepared: Prepared) -> None:
            params, pixels = SamplingParams(), prepared.picture.pixels
            self.engine.submit(CaptionRequest(str(value), pixels, (), params, 1e12, future))

        model: Any = (self.decoder, None, LIMITS)
        self.decoding.start(bytes([value]) * size, CaptionOptions(), model, future, submit)
        return future

    def working(self) -> list[Played]:
        return [each for each in self.processes if each.end.fileno() >= 0 and each.job() is not None]

    @property
    def submitted(self) -> list[Submit]:
        return [each for each in self.messages if isinstance(each, Submit)]

    def close(self) -> None:
        for each in self.processes:
            each.die()
        assert self.parent.stdin is not None
        self.parent.stdin.close()
        self.control.close()
        self.decoder.close()
        with suppress(ChildProcessError):
            self.parent.wait()


async def turns() -> None:
    """The loop looks at its sockets and calls what is due."""
    for _ in range(4):
        await asyncio.sleep(0)


def play(scene: "Coroutine[Any, Any, None]") -> None:
    asyncio.run(scene)


def of(world: World, name: str) -> float:
    return getattr(world.metrics, name)._value.get()


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


# --- whatever happens, in whatever order ---


class History:
    """Steps in any order, and what must be true after each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: list[Future[Any]] = []
        self.waiting: dict[int, Submit] = {}  # for the device
        self.running: dict[int, Submit] = {}
        self._heard = 0

    async def step(self, action: str, which: int) -> None:
        getattr(self, action)(which)
        await turns()
        for message in self.world.messages[self._heard :]:
            if isinstance(message, Submit):
                self.waiting[message.number] = message
            else:
                assert isinstance(message, Cancel)
                self.waiting.pop(message.number, None)
                self.running.pop(message.number, None)
        self._heard = len(self.world.messages)
        assert len({each.slot for each in self.waiting.values()}) == len(self.waiting) <= QUEUE

    async def end(self) -> None:
        while self.world.working():
            for process in self.world.working():
                process.answer()
            await turns()
        self.world.engine.fail()
        for future in self.asked:
            error = None if future.cancelled() else future.exception(0)
            assert error is None or isinstance(error, Overloaded | UnprocessableImage | EngineFailed)
        assert len(self.world.slots) == SLOTS
        assert self.world.decoding._count == 0
        self.world.close()

    def ask(self, _which: int) -> None:
        self.asked.append(self.world.ask(len(self.asked) + 1))

    def answer(self, which: int) -> None:
        for process in chosen(self.world.working(), which):
            process.answer()

    def refuse(self, which: int) -> None:
        for process in chosen(self.world.working(), which):
            process.answer(Refused("empty", "no"))

    def die(self, which: int) -> None:
        for process in chosen(self.world.working(), which):
            process.die()
            self.world.add()

    def leave(self, which: int) -> None:
        for future in chosen([each for each in self.asked if not each.done()], which):
            future.cancel()

    def admit(self, which: int) -> None:
        for message in chosen(list(self.waiting.values()), which):
            self.running[message.number] = self.waiting.pop(message.number)
            assert (self.world.pixels.read(message.slot) == int(message.request_id)).all()
            self.world.engine.take(Turn.of()._replace(admitted=[message.number]))

    def complete(self, which: int) -> None:
        for message in chosen(list(self.running.values()), which):
            del self.running[message.number]
            self.world.engine.take(Turn.of()._replace(completed=[(message.number, COMPLETION)]))


def chosen(items: list[Any], which: int) -> list[Any]:
    return items[which % len(items) :][:1] if items else []


actions = st.tuples(
    st.sampled_from(("ask", "ask", "answer", "answer", "refuse", "die", "leave", "admit", "complete")),
    st.integers(0, 7),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(actions, max_size=50))
def test_no_slot_is_lost_and_no_two_requests_share_one(steps: list[tuple[str, int]]) -> None:
    """Every request that comes to the engine finds its own pixels when it is admitted, however clients leave and
    processes die; and when all is over, all slots are free."""

    async def scene() -> None:
        world = World()
        await world.begin()
        history = History(world)
        for action, which in steps:
            await history.step(action, which)
        await history.end()

    play(scene())
