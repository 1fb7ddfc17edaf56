"""The campaign of faults, as short as it can be, and its parts against servers that are made to fail here."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from snapcap.benchmarks.harness.server import Reply, request_bytes
from snapcap.benchmarks.soak.__main__ import went_well
from snapcap.benchmarks.soak.clients import GoodClients, requests
from snapcap.benchmarks.soak.servers import Lie, LyingProxy, Replica, ask

ROOT = Path(__file__).parent.parent.parent
Answer = Callable[[bytes], Awaitable[bytes]]


def reply(status: int, body: bytes = b"", *lines: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *lines))
    return f"{head}\r\n".encode() + body


class Answering:
    """A server whose replies are given in turn, the last of them again and again; b"" closes the connection. It
    stands for a replica."""

    def __init__(self, *replies: bytes) -> None:
        self._replies = list(replies)
        self.asked = 0
        self.port = 0

    async def start(self) -> "Answering":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        writer.write(self._replies.pop(0) if len(self._replies) > 1 else self._replies[0])
        await writer.drain()
        writer.close()


BUSY = reply(429, b"", "Retry-After: 1")


def tally_of(*servers: Answering) -> dict[str, Any]:
    """Returns the counts of one good client of these servers, and the number of requests to each server."""

    async def run() -> dict[str, Any]:
        started = [await each.start() for each in servers]
        clients, over = GoodClients(cast("list[Replica]", started), Random(0)), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run(over))
            while clients.tally.requests < 2:  # noqa: ASYNC110  they count for themselves
                await asyncio.sleep(0.01)
            over.set()
        return vars(clients.tally)

    return asyncio.run(run())


def test_good_clients_see_what_is_wrong_and_what_is_lost() -> None:
    # Every API's way of saying it.
    caption = "a caption that is none of the samples'"
    choices = [{"message": {"content": caption}}]
    document = {"caption": caption, "choices": choices, "outputs": [{"data": [caption]}]}
    paths = [request.api for request in requests()]
    wrong = tally_of(Answering(reply(200, json.dumps(document).encode())))
    assert {"/", "/v1/caption", "/v1/chat/completions", "/v2/models/demo/infer"} <= set(paths)
    assert (wrong["wrong"], wrong["lost"]) == (wrong["requests"], 0)
    lost = tally_of(Answering(reply(500)))
    assert (lost["wrong"], lost["lost"], lost["retried"]) == (0, lost["requests"], 0)


def test_good_clients_come_again() -> None:
    again = tally_of(Answering(BUSY, b"", b"HTTP/1.1 200 X\r\nContent-Len", reply(500)))
    assert again["retried"] == 3


def test_good_clients_try_the_other_server_at_once() -> None:
    busy, other = Answering(reply(503, b"", "Retry-After: 100")), Answering(reply(500))
    again = tally_of(busy, other)
    assert again["lost"] == again["requests"] == other.asked
    assert again["retried"] == busy.asked


@pytest.mark.parametrize(
    ("lie", "whole"), [(Lie.NONE, True), (Lie.DELAY, True), (Lie.CUT, False), (Lie.CORRUPTION, False)]
)
def test_the_proxy_lies(lie: Lie, whole: bool) -> None:
    content = bytes(range(256)) * 40

    async def run() -> bytes:
        store = await Answering(reply(200, content)).start()
        proxy = LyingProxy(store.port, Random(0))
        proxy.lie = lie
        await proxy.start()
        try:
            return (await ask(proxy.port, request_bytes("/"), 10)).body
        finally:
            proxy.stop()

    assert (asyncio.run(run()) == content) is whole


def test_the_proxy_keeps_silent() -> None:
    async def run() -> Reply:
        store = await Answering(reply(200, b"x")).start()
        proxy = LyingProxy(store.port, Random(0))
        proxy.lie = Lie.SILENCE
        await proxy.start()
        try:
            return await ask(proxy.port, request_bytes("/", b"x", "text/plain"), 0.5)
        finally:
            proxy.stop()

    silence = asyncio.run(run())
    assert (silence.status, silence.body) == (0, b"TimeoutError: ")


BY_STATUS = "bad_requests_by_status"
GOOD: dict[str, Any] = {"lost": 0, "wrong": 0, "not_recovered": [], "ended_well": True, BY_STATUS: {}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lost", 1),
        ("wrong", 1),
        ("not_recovered", ["drained"]),
        ("ended_well", False),
        (BY_STATUS, {"500": 1}),
    ],
)
def test_what_is_no_success(field: str, value: Any) -> None:
    assert went_well(GOOD)
    assert not went_well({**GOOD, field: value})


def test_a_short_campaign(tmp_path: Path) -> None:
    """Real servers, some faults of each kind that needs no built artifacts: nothing lost, nothing wrong."""
    faults = "decode-killed,clients-flood,clients-leave,server-killed"
    result = tmp_path / "soak.json"
    # Each fault is injected once, however long that takes.
    command = [sys.executable, "-m", "snapcap.benchmarks.soak", "--minutes", "0.02", "--faults", faults]
    run = subprocess.run(
        [*command, "--seed", "1", "--clients", "2", "--json", str(result)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(result.read_text())
    assert {strike["fault"] for strike in found["strikes"]} == set(faults.split(","))
    assert found["totals"]["requests"] > 30
    assert "server-killed" in run.stdout
