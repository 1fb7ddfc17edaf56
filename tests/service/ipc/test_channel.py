"""The socket between the two processes: nobody waits on the event loop, and nothing is lost or out of order."""

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import pytest

from snapcap.service.engine.remote.messages import Cancel, Failed, Message
from snapcap.service.engine.remote.server import BlockingChannel
from snapcap.service.ipc import shared_pixels
from snapcap.service.ipc.channel import LoopChannel
from snapcap.service.ipc.shared_pixels import SharedPixels, image_file, write_image

PATIENCE = 30.0
Channel: TypeAlias = LoopChannel[Message]
MANY = 5000  # more than a socket holds


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def received(end: socket.socket, count: int) -> list[Message]:
    """The next so many messages, and what came with them; fewer at the end of file."""
    channel, found = BlockingChannel(end), []
    while len(found) < count and (messages := channel.receive()) is not None:
        found += messages
    return found


def on_a_loop(end: socket.socket, use: Callable[[Channel], Any], messages: list[Message] | None = None) -> Any:
    """What a thread makes of a channel whose loop runs meanwhile."""

    async def run() -> Any:
        taken: list[Message] = [] if messages is None else messages
        channel = LoopChannel(end, asyncio.get_running_loop(), taken.append)
        return await asyncio.wait_for(asyncio.to_thread(use, channel), PATIENCE)

    return asyncio.run(run())


def test_who_sends_does_not_wait_for_an_end_that_does_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends

    def use(channel: Channel) -> list[Message]:
        for number in range(MANY):
            channel.send(Cancel(number))  # returns, though nobody has read yet
        return received(theirs, MANY)

    assert on_a_loop(ours, use) == [Cancel(number) for number in range(MANY)]


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_messages_that_the_system_has_no_memory_for_are_sent_later(
    ends: tuple[socket.socket, socket.socket], number: int
) -> None:
    class Short(socket.socket):
        left = 3

        def send(self, data: Any, flags: int = 0) -> int:
            if self.left:
                self.left -= 1
                raise OSError(number, os.strerror(number))
            return super().send(data, flags)

    def use(channel: Channel) -> list[Message]:
        channel.send(Cancel(1))
        channel.send(Cancel(2))
        return received(ends[1], 2)

    with Short(fileno=ends[0].detach()) as ours:
        ends[1].settimeout(PATIENCE / 2)
        assert on_a_loop(ours, use) == [Cancel(1), Cancel(2)]


def test_a_channel_says_when_too_much_waits_and_when_it_does_no_more(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    large = Failed("x" * (1 << 20))

    def use(channel: Channel) -> int:
        count = 0
        while channel.has_room:
            channel.send(large)
            count += 1
        assert received(theirs, count) == [large] * count
        while not channel.has_room:
            time.sleep(0.01)
        return count

    assert 16 <= on_a_loop(ours, use) <= 18  # MiB, with what the socket holds


def test_messages_of_several_threads_stay_whole_and_each_threads_in_order(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends

    def use(channel: Channel) -> list[Message]:
        def send(thread: int) -> None:
            for number in range(MANY // 4):
                channel.send(Cancel(10 * number + thread))

        with ThreadPoolExecutor(5) as pool:
            reader = pool.submit(received, theirs, MANY)
            list(pool.map(send, range(4)))
            return reader.result(PATIENCE)

    numbers = [message.number for message in on_a_loop(ours, use) if isinstance(message, Cancel)]
    for thread in range(4):
        assert [n // 10 for n in numbers if n % 10 == thread] == list(range(MANY // 4))


def test_what_arrives_is_taken_on_the_loop(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    sent = [Failed("x" * size) for size in (1, 100_000, 10, 1_000_000, 1)]
    taken: list[Message] = []

    def use(_channel: Channel) -> None:
        channel = BlockingChannel(theirs)
        for message in sent:
            channel.send(message)
        end = threading.Event()
        while len(taken) < len(sent):
            end.wait(0.01)

    on_a_loop(ours, use, taken)
    assert taken == sent


def test_the_end_of_one_is_heard_by_the_other(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends

    def use(channel: Channel) -> tuple[object, None]:
        other = BlockingChannel(theirs)
        channel.close()
        heard = other.receive()
        return heard, other.send(Failed("nobody hears it"))  # and it is no error

    assert on_a_loop(ours, use) == (None, None)


def test_pixels_written_by_one_process_are_read_by_the_other() -> None:
    pixels = SharedPixels(4)
    pixels.open((3, 2))
    picture = np.arange(18, dtype=np.uint8).reshape(3, 2, 3)
    pixels.read(2)[:] = picture
    file = image_file((3, 2))
    write_image(file, picture.tobytes())
    pixels.copy(3, file)
    pid = os.fork()
    if pid == 0:
        pixels.open((3, 2))  # as the engine process does it, after the fork
        same = all((pixels.read(slot) == picture).all() for slot in (2, 3))
        os._exit(0 if same and not pixels.read(1).any() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(ValueError, match="17 bytes of pixels for a file of 18"):
        write_image(file, bytes(17))


@pytest.mark.parametrize("size", [0, 17, 36])
def test_the_file_of_an_image_keeps_its_size(size: int) -> None:
    """Whatever the process that writes it does: else it could end who has it mapped, or fill the memory."""
    file = image_file((3, 2))
    with pytest.raises(PermissionError):
        os.ftruncate(file, size)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 1 << 40)
    os.close(file)


def test_a_file_that_cannot_be_sealed_and_was_cut_has_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pixels, "seal", lambda file: None)
    pixels, file = SharedPixels(2), image_file((3, 2))
    pixels.open((3, 2))
    os.ftruncate(file, 17)
    with pytest.raises(ValueError, match="17 bytes of pixels, a slot has 18"):
        pixels.copy(1, file)
    os.close(file)


def test_slots_that_were_never_used_take_no_memory() -> None:
    pixels = SharedPixels(1000)
    pixels.open((224, 224))
    pixels.read(999)[:] = 1
    assert os.fstat(pixels.file).st_blocks * 512 < 10 * 224 * 224 * 3
