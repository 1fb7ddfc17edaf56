"""What is dropped is read slowly: others have their turn."""

import asyncio
from collections.abc import Callable

import pytest

from snapcap.service.http import protocol
from snapcap.service.http.protocol import Flow


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.closing = False

    def pause_reading(self) -> None:
        self.said.append("pause")

    def resume_reading(self) -> None:
        self.said.append("resume")

    def is_closing(self) -> bool:
        return self.closing


Scene = Callable[[Transport, Flow, list[str]], None]


def play(monkeypatch: pytest.MonkeyPatch, scene: Scene, closing: bool = False) -> list[str]:
    monkeypatch.setattr(protocol, "_DROP_S", 0.01)

    async def run() -> list[str]:
        transport, waiting = Transport(), []
        transport.closing = closing
        scene(transport, Flow(transport, waiting, asyncio.get_running_loop()), waiting)
        await asyncio.sleep(0.05)
        return transport.said

    return asyncio.run(run())


def test_one_packet_is_dropped_and_the_next_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def scene(transport: Transport, dropping: Flow, waiting: list[str]) -> None:
        dropping.drop()
        dropping.drop()
        dropping.resume_reading()  # as when a reply is complete
        assert transport.said == ["pause"]

    assert play(monkeypatch, scene) == ["pause", "resume"]


def test_nothing_is_read_while_requests_wait_or_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def scene(transport: Transport, dropping: Flow, waiting: list[str]) -> None:
        waiting.append("request")
        dropping.drop()

    assert play(monkeypatch, scene) == ["pause"]
    assert play(monkeypatch, lambda transport, dropping, _: dropping.drop(), closing=True) == ["pause"]
