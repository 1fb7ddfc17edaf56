"""Balances HTTP load over servers, as an ingress does.

Requests go to servers that /readyz says are ready. A request is tried on another server in two cases. The first is
a connection that was refused, or lost before the reply had begun, because a caption changes nothing and may be
requested twice. The second is a reply of 429 or 503 with Retry-After. All other replies go back to the client
unchanged.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from snapcap.benchmarks.harness.http_probe import content_length
from snapcap.benchmarks.soak.asking import CutError, Reply, ask
from snapcap.benchmarks.soak.replica import Replica

PROBE_S = 0.25
ATTEMPTS = 3
TIMEOUT_S = 60.0


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
