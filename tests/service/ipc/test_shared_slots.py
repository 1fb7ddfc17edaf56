"""The slots of the shared pixels, whatever happens in whatever order to clients, decode processes and engine."""

import asyncio
import os
import resource
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.decode_world import COMPLETION, QUEUE, SLOTS, World, play, turns

from snapcap.service.engine.remote.messages import Cancel, Submit, Turn
from snapcap.service.errors import NotReady, UnprocessableImage
from snapcap.service.images.messages import Refused
from snapcap.service.ipc.shared_pixels import image_file, write_image
from snapcap.service.limits import QueueFull


class History:
    """Steps in any order, and what must be true after each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: list[asyncio.Task[Any]] = []
        self.waiting: dict[int, Submit] = {}  # for the device
        self.running: dict[int, Submit] = {}
        self._heard = 0

    async def step(self, action: str, which: int, turns: int) -> None:
        """`turns` of the event loop pass before the next step, which may be too few for all that follows."""
        if action == "ask":
            await self.ask()
        else:
            getattr(self, action)(which)
        for _ in range(turns):
            await asyncio.sleep(0)
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
        await turns()  # an image whose process has just died is given to another one
        while self.world.working():
            for process in self.world.working():
                process.answer()
            await turns()
        self.world.engine.fail()
        await turns()
        for future in self.asked:
            error = None if future.cancelled() else future.exception()
            assert error is None or isinstance(error, UnprocessableImage | NotReady)
        assert len(self.world.slots) == SLOTS
        assert self.world.admission.taken == 0
        self.world.close()

    async def ask(self) -> None:
        with suppress(QueueFull):
            permit = self.world.admission.admit()
            permit.take()
            self.asked.append(await self.world.ask(len(self.asked) + 1, permit=permit))

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
    st.integers(0, 8),
)


@settings(max_examples=120)
@given(st.lists(actions, max_size=50))
def test_no_slot_is_lost_and_no_two_requests_share_one(steps: list[tuple[str, int, int]]) -> None:
    """Every request that comes to the engine finds its own pixels when it is admitted, however clients leave and
    processes die; and when all is over, all slots are free."""

    async def scene() -> None:
        world = World()
        await world.begin()
        history = History(world)
        for step in steps:
            await history.step(*step)
        await history.end()

    play(scene())


def test_pixels_of_which_only_a_part_has_room_are_an_error() -> None:
    """Otherwise the rest of the picture would be black, and its caption wrong."""
    file, (soft, hard) = image_file((20, 50)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # writes end there, as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            write_image(file, b"\x7f" * 3000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    write_image(file, b"\x7f" * 3000)
    assert os.pread(file, 3000, 0) == b"\x7f" * 3000
    os.close(file)
