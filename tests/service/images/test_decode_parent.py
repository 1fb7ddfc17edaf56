"""The parent of the decode processes, and the sockets that it hands over, as the HTTP process gets them."""

import asyncio
import logging
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.fakes.list_engine import PATIENCE
from support.servers.server_process import clean_environment

from snapcap.service.images.messages import Began, Ended, Notice
from snapcap.service.images.parent import FULL_S, PAUSE_S
from snapcap.service.images.processes import NoticeChannel
from snapcap.service.ipc.framing import RECEIVE_BYTES, Unpacker, pack
from snapcap.service.ipc.shared_pixels import image_file

PROGRAM = """
import socket, sys
from types import SimpleNamespace
from snapcap.models.processing.transform import ImageTransform
from snapcap.service.images import parent as decode_parent
from snapcap.service.images.messages import Setup
decode_parent.time = SimpleNamespace(sleep=lambda seconds: print(seconds, flush=True))
family = decode_parent._Family(1, socket.socket(fileno=int(sys.argv[1])), Setup(ImageTransform((2, 2)), 1 << 30))
family.keep()
"""


def test_a_process_whose_socket_was_lost_is_replaced_until_the_server_ends() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
        env=clean_environment(),
        cwd=Path(__file__).parents[3],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    seen: set[int] = set()
    unpacker = Unpacker[Notice]()
    while len(seen) < 3:
        data, descriptors, _, _ = socket.recv_fds(ours, RECEIVE_BYTES, 4)
        *ends, last = unpacker.feed(data)  # an end may arrive together with the next beginning
        for notice in ends if isinstance(last, Began) else (*ends, last):
            assert isinstance(notice, Ended)
            assert notice.pid in seen
            assert notice.code == 0
        if not isinstance(last, Began):
            continue
        seen.add(last.pid)
        end, file = descriptors
        assert os.fstat(file).st_size == 2 * 2 * 3
        if len(seen) == 2:
            ours.send(b"\0")
        if len(seen) == 3:
            ours.close()
        os.close(file)
        os.close(end)  # with status 0 it ends
    assert len(seen) == 3
    pauses = parent.communicate(timeout=PATIENCE)[0].split()
    assert pauses == [str(PAUSE_S), str(FULL_S), "0.0"], "the server said that it had no room"
    assert parent.returncode == 0


class Heard:
    """A NoticeChannel and what it says."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.began: list[socket.socket] = []
        self.said: list[Notice] = []
        self.channel = NoticeChannel(
            ours,
            asyncio.get_running_loop(),
            self._began,
            self.said.append,
            lambda: None,
        )

    def _began(self, _notice: Began, end: socket.socket, file: int) -> None:
        assert not os.get_inheritable(file)
        os.close(file)
        self.began.append(end)

    async def tell(self, pid: int) -> None:
        end, _ = socket.socketpair()
        file = image_file((2, 2))
        socket.send_fds(self.theirs, [pack(Began(pid))], [end.fileno(), file])
        end.close()
        os.close(file)
        for _ in range(4):
            await asyncio.sleep(0)

    def close(self) -> None:
        self.channel.leave()
        self.channel.close()
        for each in (self.theirs, *self.began):
            each.close()


def test_a_socket_to_a_decode_process_is_not_for_other_programs() -> None:
    async def scene() -> None:
        heard = Heard()
        await heard.tell(7)
        (end,) = heard.began
        assert not end.get_inheritable()
        heard.close()

    asyncio.run(scene())


@pytest.mark.parametrize("room", [0, 1], ids=["none", "the socket alone"])
def test_without_room_for_a_socket_and_its_file_the_next_ones_are_still_heard(
    room: int, caplog: pytest.LogCaptureFixture
) -> None:
    def lowest() -> int:
        """The number that the next file would have."""
        file = os.dup(0)
        os.close(file)
        return file

    async def scene() -> None:
        heard = Heard()
        end, other = socket.socketpair()
        file = image_file((2, 2))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        socket.send_fds(heard.theirs, [pack(Began(7))], [end.fileno(), file])
        os.close(file)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest() + room, hard))
            for _ in range(4):
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert heard.began == []
        assert heard.said == [Began(7)], "its parent lives"
        assert heard.theirs.recv(64), "and waits before it starts another"
        await heard.tell(8)
        assert len(heard.began) == 1
        heard.close()
        end.close()
        other.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scene())
    assert [each.getMessage() for each in caplog.records] == ["no socket to a decode process"]
