"""The HTTP process: how its event loop gets Python's lock from the threads that parse bodies."""

import socket
import sys

import pytest

from snapcap.service.config.settings import Settings
from snapcap.service.server import http_process
from snapcap.warmup.progress.timeline import Timeline


def test_threads_give_the_lock_back_sooner_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python's 5 ms, each message of the loop waits so long for every body that a thread parses."""
    during: list[float] = []

    class Server:
        def run(self, sockets: list[socket.socket]) -> None:
            during.append(sys.getswitchinterval())

        def begin_exit(self) -> None: ...

    monkeypatch.setattr(http_process, "Server", lambda *_: Server())
    before = sys.getswitchinterval()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        status = http_process.run(Settings(), [listener], None, Timeline(0.0), lambda: pytest.fail("no start"))
    assert status == 0
    assert during == [pytest.approx(0.0005)]
    assert sys.getswitchinterval() == before
