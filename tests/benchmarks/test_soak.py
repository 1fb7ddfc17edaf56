"""The campaign of faults, as short as it can be, and its parts against servers that are made to fail here."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from snapcap.benchmarks.harness.processes import own_parts
from snapcap.benchmarks.harness.server import serving
from snapcap.benchmarks.soak.__main__ import went_well
from snapcap.benchmarks.soak.balancer import Balancer, Lie, LyingProxy
from snapcap.benchmarks.soak.clients import GoodClients, requests
from snapcap.benchmarks.soak.faults import ENGINE
from snapcap.benchmarks.soak.replica import CutError, Replica, ask, lone_request

ROOT = Path(__file__).parent.parent.parent
Answer = Callable[[bytes], Awaitable[bytes]]


def reply(status: int, body: bytes = b"", *lines: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *lines))
    return f"{head}\r\n".encode() + body


class Answering:
    """A server whose replies are given in turn, the last of them again and again; b"" closes the connection. It
    stands for a replica that is ready."""

    def __init__(self, *replies: bytes) -> None:
        self._replies = list(replies)
        self.asked = 0
        self.port = 0

    async def start(self) -> "Answering":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def is_ready(self) -> bool:
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        writer.write(self._replies.pop(0) if len(self._replies) > 1 else self._replies[0])
        await writer.drain()
        writer.close()


async def balanced(*replicas: Answering) -> Balancer:
    started = [await each.start() for each in replicas]
    balancer = Balancer(cast("list[Replica]", started))
    await balancer.start()
    await asyncio.sleep(0.05)
    return balancer


BUSY = reply(429, b"", "Retry-After: 1")


@pytest.mark.parametrize(
    ("first", "status", "asked"),
    [
        (BUSY, 200, [1, 1]),
        (reply(503, b"", "Retry-After: 1"), 200, [1, 1]),
        (b"", 200, [1, 1]),  # lost before a reply began
        (reply(503), 503, [0, 1]),  # nobody said that it may come again
        (reply(500), 500, [0, 1]),
        (reply(504), 504, [0, 1]),
        (b"HTTP/1.1 200 X\r\nContent-Len", 502, [0, 1]),  # cut in the middle
    ],
)
def test_the_balancer_tries_again_what_may_be(first: bytes, status: int, asked: list[int]) -> None:
    async def run() -> tuple[int, list[int]]:
        good, failing = Answering(reply(200, b"good")), Answering(first)
        balancer = await balanced(good, failing)
        found = await ask(balancer.port, lone_request("/"), 5)
        await balancer.stop()
        return found.status, [good.asked, failing.asked]

    assert asyncio.run(run()) == (status, asked)


def test_the_last_refusal_reaches_the_client() -> None:
    async def run() -> tuple[int, float | None]:
        balancer = await balanced(Answering(BUSY), Answering(BUSY))
        found = await ask(balancer.port, lone_request("/"), 5)
        await balancer.stop()
        return found.status, found.retry_after

    assert asyncio.run(run()) == (429, 1.0)


def tally_of(*replies: bytes) -> dict[str, Any]:
    """What good clients counted of a server that gives these replies."""

    async def run() -> dict[str, Any]:
        server = await Answering(*replies).start()
        clients = GoodClients(server.port, 1, Random(0))
        clients.start()
        while clients.tally.requests < 2:  # noqa: ASYNC110  they count for themselves
            await asyncio.sleep(0.01)
        await clients.stop()
        return vars(clients.tally)

    return asyncio.run(run())


def test_good_clients_see_what_is_wrong_and_what_is_lost() -> None:
    # Every API's way of saying it.
    caption = "a caption that is none of the samples'"
    choices = [{"message": {"content": caption}}]
    document = {"caption": caption, "choices": choices, "outputs": [{"data": [caption]}]}
    paths = [request.api for request in requests()]
    wrong = tally_of(reply(200, json.dumps(document).encode()))
    assert {"/", "/v1/caption", "/v1/chat/completions", "/v2/models/demo/infer"} <= set(paths)
    assert (wrong["wrong"], wrong["lost"]) == (wrong["requests"], 0)
    lost = tally_of(reply(500))
    assert (lost["wrong"], lost["lost"], lost["retried"]) == (0, lost["requests"], 0)


def test_good_clients_come_again() -> None:
    again = tally_of(BUSY, b"", reply(500))
    assert again["retried"] == 2


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
            return (await ask(proxy.port, lone_request("/"), 10)).body
        except CutError:
            return b""
        finally:
            proxy.stop()

    assert (asyncio.run(run()) == content) is whole


def test_the_proxy_keeps_silent() -> None:
    async def run() -> None:
        store = await Answering(reply(200, b"x")).start()
        proxy = LyingProxy(store.port, Random(0))
        proxy.lie = Lie.SILENCE
        await proxy.start()
        try:
            await ask(proxy.port, lone_request("/", b"x", "text/plain"), 0.5)
        finally:
            proxy.stop()

    with pytest.raises(TimeoutError):
        asyncio.run(run())


BY_STATUS = "bad requests, by status"
GOOD: dict[str, Any] = {"lost": 0, "wrong": 0, "not recovered": [], "ended well": True, BY_STATUS: {}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lost", 1),
        ("wrong", 1),
        ("not recovered", ["drained"]),
        ("ended well", False),
        (BY_STATUS, {"500": 1}),
    ],
)
def test_what_is_no_success(field: str, value: Any) -> None:
    assert went_well(GOOD)
    assert not went_well({**GOOD, field: value})


def test_half_a_minute(tmp_path: Path) -> None:
    """Real servers, some faults of each kind that needs no built artifacts: nothing lost, nothing wrong."""
    faults = "decode-killed,clients-flood,clients-leave,server-killed"
    result = tmp_path / "soak.json"
    command = [
        sys.executable,
        "-m",
        "snapcap.benchmarks.soak",
        "--minutes",
        "0.2",
        "--faults",
        faults,
        "--seed",
        "1",
    ]
    run = subprocess.run(
        [*command, "--clients", "3", "--json", str(result)],
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


def test_the_launcher_reaches_the_engine_process(tmp_path: Path) -> None:
    """Where there is no CUDA device the signal's handler fails in it, which ends the server as a fault does."""
    launcher = (sys.executable, "-m", "snapcap.benchmarks.soak.launcher", "serve", "--host", "127.0.0.1")
    options = ("--device", "cpu", "--backend", "eager", "--build", "off", "--cache-dir", str(tmp_path))
    with serving((*launcher, *options)) as server:
        server.wait_ready(server.connect())
        os.kill(own_parts(server.pid)[ENGINE], signal.SIGUSR2)
        assert os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT).si_status == 1
        assert "assert_on_device" in server.log()
