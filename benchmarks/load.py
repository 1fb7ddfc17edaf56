"""A lean HTTP load generator, run as a process of its own because it shares the CPUs with the server it measures.

    python -m benchmarks.load --port 8000 --path /v1/caption --clients 16 --seconds 10

Each client is one keep-alive connection that sends the next sample as soon as it has its caption. Prints one JSON
line: captions, seconds, their latencies' p50 and p99 in ms, wrong captions, errors, and the CPU seconds it took.
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import uvloop

from benchmarks.common import samples
from benchmarks.http_probe import content_length, request_bytes

GRACE_S = 30.0  # for the replies under way when the time is over


@dataclass
class Tally:
    """What all clients have counted; latencies in seconds, of the replies before ``until``."""

    until: float
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: int = 0


class Client(asyncio.Protocol):
    """One connection: one request at a time until the time is over."""

    def __init__(self, requests: list[tuple[bytes, bytes]], first: int, tally: Tally) -> None:
        """``requests``: whole requests, each with what its reply must contain."""
        self._requests = requests
        self._next = first
        self._tally = tally
        self._buffer = b""
        self._sent = 0.0
        self._expected = b""
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not registered as what they are.
        self._transport = cast("asyncio.Transport", transport)
        self._send(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator or len(body) < content_length(head) or self._transport is None:
            return
        self._buffer = b""
        now = time.perf_counter()
        if now < self._tally.until:
            self._tally.latencies.append(now - self._sent)
            if head[9:12] != b"200":
                self._tally.errors += 1
            elif self._expected not in body:
                self._tally.wrong += 1
            self._send(self._transport)
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or time.perf_counter() < self._tally.until:
            self._tally.errors += 1
        if not self.done.done():
            self.done.set_result(None)

    def _send(self, transport: asyncio.Transport) -> None:
        request, self._expected = self._requests[self._next % len(self._requests)]
        self._next += 1
        self._sent = time.perf_counter()
        transport.write(request)


def _given(client: Client) -> Client:
    return client


async def run(port: int, path: str, clients: int, seconds: float) -> Tally:
    requests = [(request_bytes(path, image), caption.encode()) for image, caption in samples().values()]
    loop = asyncio.get_running_loop()
    tally = Tally(time.perf_counter() + seconds)
    connections = [Client(requests, first, tally) for first in range(clients)]
    for client in connections:
        await loop.create_connection(partial(_given, client), "127.0.0.1", port)
    async with asyncio.timeout(seconds + GRACE_S):
        await asyncio.gather(*(client.done for client in connections))
    return tally


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile of sorted values."""
    return values[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/caption")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    tally = uvloop.run(run(options.port, options.path, options.clients, options.seconds))
    latencies = sorted(tally.latencies)
    result = {
        "captions": len(latencies) - tally.errors,
        "seconds": options.seconds,
        "p50_ms": percentile(latencies, 0.50) * 1000,
        "p99_ms": percentile(latencies, 0.99) * 1000,
        "wrong": tally.wrong,
        "errors": tally.errors,
        "cpu_s": time.process_time(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
