"""Balances HTTP load over servers, as an ingress does.

Requests go to servers that /readyz says are ready. A request is tried on another server in two cases. The first is
a connection that was refused, or lost before the reply had begun, because a caption changes nothing and may be
requested twice. The second is a reply of 429 or 503 with Retry-After. All other replies go back to the client
unchanged.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from enum import Enum
from typing import Any

from snapcap.benchmarks.harness.server import content_length
from snapcap.benchmarks.soak.replica import CutError, Replica, Reply, ask

PROBE_S = 0.25
ATTEMPTS = 3
TIMEOUT_S = 60.0
DELAY_S = 0.5  # for each piece


def answer(status: int, title: str, *lines: str) -> bytes:
    """Returns a reply of the balancer's own."""
    head = "\r\n".join([f"HTTP/1.1 {status} {title}", "Content-Length: 0", "Connection: close", *lines])
    return f"{head}\r\n\r\n".encode()


NOBODY = answer(503, "Service Unavailable", "Retry-After: 1")
BAD_GATEWAY = answer(502, "Bad Gateway")
GATEWAY_TIMEOUT = answer(504, "Gateway Timeout")


class Balancer:
    """A balancer. ``retried`` counts attempts after the first."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.retried = 0
        self.port = 0
        self._replicas = replicas
        self._ready: list[Replica] = []
        self._turn = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._probe(each)) for each in self._replicas]
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()

    async def _probe(self, replica: Replica) -> None:
        while True:
            self._set(replica, await replica.is_ready())
            await asyncio.sleep(PROBE_S)

    def _set(self, replica: Replica, ready: bool) -> None:
        if ready and replica not in self._ready:
            self._ready.append(replica)
        elif not ready and replica in self._ready:
            self._ready.remove(replica)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(await self._pass_on(await _request(reader)))
            await writer.drain()
        writer.close()

    async def _pass_on(self, request: bytes) -> bytes:
        tried: list[Replica] = []
        last: bytes = NOBODY
        for _ in range(ATTEMPTS):
            replica = self._next(tried)
            if replica is None:
                return last
            self.retried += bool(tried)
            tried.append(replica)
            try:
                reply = await ask(replica.port, request, TIMEOUT_S)
            except CutError:
                return BAD_GATEWAY
            except TimeoutError:
                return GATEWAY_TIMEOUT
            except OSError:
                self._set(replica, False)
                last = NOBODY
                continue
            if not _passes(reply):
                return reply.raw
            last = reply.raw
        return last

    def _next(self, tried: Sequence[Replica]) -> Replica | None:
        """Returns the next ready server that was not tried yet, in turn, or None."""
        free = [each for each in self._ready if each not in tried]
        self._turn += 1
        return free[self._turn % len(free)] if free else None


def _passes(reply: Reply) -> bool:
    """Returns whether the reply asks to retry later."""
    return reply.status in (429, 503) and reply.retry_after is not None


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(content_length(head, 0))


class Lie(Enum):
    """A treatment of the store's bytes."""

    NONE = "passes on"
    SILENCE = "black hole"
    DELAY = "slow"
    CUT = "truncates"
    CORRUPTION = "corrupts"


class LyingProxy:
    """A proxy. ``lie`` may be changed at any time, and applies to each later piece."""

    def __init__(self, store_port: int, chooser: random.Random) -> None:
        self.lie = Lie.NONE
        self.port = 0
        self._store_port = store_port
        self._chooser = chooser
        self._server: asyncio.Server | None = None
        # Keeps references, because otherwise a task that waits for a silent store could be collected.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):
            store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self._store_port)
            asks = asyncio.create_task(_copy(reader, store_writer))
            with contextlib.suppress(OSError):
                await self._answer(store_reader, writer)
            asks.cancel()
            store_writer.close()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            while self.lie is Lie.SILENCE:  # noqa: ASYNC110 - until somebody changes it
                await asyncio.sleep(0.1)
            if self.lie is Lie.DELAY:
                await asyncio.sleep(DELAY_S)
            elif self.lie is Lie.CUT and len(piece) > 1000:
                writer.write(piece[: len(piece) // 2])
                await writer.drain()
                return
            elif self.lie is Lie.CORRUPTION and len(piece) > 1000:
                piece = self._corrupted(piece)
            writer.write(piece)
            await writer.drain()

    def _corrupted(self, piece: bytes) -> bytes:
        """Returns the piece with one bit of its second half flipped, so the head of a reply stays intact."""
        changed = bytearray(piece)
        changed[self._chooser.randrange(len(piece) // 2, len(piece))] ^= 1 << self._chooser.randrange(8)
        return bytes(changed)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
