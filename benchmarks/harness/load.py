"""Puts a server under HTTP load from processes of their own, which share the CPUs with the measured server.

In a closed loop, each client is a keep-alive connection that sends the next image as soon as it has its caption.
With a rate the loop is open: requests are due at random moments (Poisson), however long the replies take, and
latency counts from the moment a request was due. The clients' connections serve the open loop, and more are opened
if all are busy.
"""

import asyncio
import contextlib
import multiprocessing
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvloop

from snapcap.benchmarks.harness.processes import tree_cpu_seconds
from snapcap.benchmarks.harness.report import percentiles_ms
from snapcap.benchmarks.harness.server import Endpoint, Server, request_bytes
from snapcap.benchmarks.harness.workload import read_images

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

GRACE_S = 120.0  # time for the last replies after the load has ended
# Every reply measured here has its length.
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
COMPONENTS = ("encoder", "decoder")
SERVING_COMPILES = 'snapcap_compile_events_total{when="serving"}'
Request = tuple[bytes, bytes]  # a whole request, and the text that its reply must contain


@dataclass
class Tally:
    """The counts of all clients. Latencies are in seconds, of the replies to requests due before ``until``."""

    began: float = 0.0
    until: float = 0.0
    last: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: int = 0
    unanswered: int = 0  # requests under way
    cpu_s: float = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds until the last reply."""
        return max(self.last - self.began, 0.0)


class Client(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._buffer = b""
        self._due = 0.0
        self._expected = b""
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not registered as asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    async def ask(self, request: Request, due: float) -> bool:
        """Sends a request and counts its reply. Returns False if the connection is lost."""
        if self._transport is None or self._transport.is_closing():
            return False
        self._reply = asyncio.get_running_loop().create_future()
        self._due, self._expected = due, request[1]
        self._tally.unanswered += 1
        self._transport.write(request[0])
        return await self._reply

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator or self._reply is None:
            return
        length = _LENGTH.search(head)
        if length is None or len(body) < int(length[1]):
            return
        self._buffer = b""
        tally, status = self._tally, head[9:12]
        tally.unanswered -= 1
        if status != b"200":
            tally.errors += 1
        else:
            tally.wrong += self._expected not in body
            tally.last = time.perf_counter()
            tally.latencies.append(tally.last - self._due)
        self._reply.set_result(True)

    def connection_lost(self, error: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._tally.errors += 1
            self._tally.unanswered -= 1
            self._reply.set_result(False)


async def connect(port: int, count: int, tally: Tally) -> list[Client]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(partial(Client, tally), "127.0.0.1", port))[1] for _ in range(count)]


async def closed_loop(clients: list[Client], requests: list[Request], tally: Tally) -> None:
    """Lets every client send a request as soon as it has its reply. Requests sent in time count, however late the
    reply."""

    async def one(client: Client, first: int) -> None:
        turn = first
        while time.perf_counter() < tally.until:
            if not await client.ask(requests[turn % len(requests)], time.perf_counter()):
                return
            turn += 1

    await asyncio.gather(*(one(client, first) for first, client in enumerate(clients)))


async def open_loop(
    clients: list[Client], requests: list[Request], tally: Tally, port: int, rate: float, seed: int
) -> None:
    """Sends requests at random moments, on average ``rate`` a second. Every request counts."""
    chooser, idle, under_way = random.Random(seed), list(clients), set()
    due = time.perf_counter()

    async def one(turn: int, due: float) -> None:
        client = idle.pop() if idle else (await connect(port, 1, tally))[0]
        if await client.ask(requests[turn % len(requests)], due):
            idle.append(client)

    turn = 0
    while True:
        due += chooser.expovariate(rate)
        if due >= tally.until:
            break
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        task = asyncio.create_task(one(turn, due))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        turn += 1
    await asyncio.gather(*under_way)


@dataclass(frozen=True)
class HttpLoad:
    """A load of ``clients``, split among processes. ``rate`` is requests a second of an open loop, or 0."""

    images: Path
    clients: int
    seconds: float
    processes: int = 1
    rate: float = 0.0

    def run(self, server: Server) -> dict[str, float]:
        """Runs the load once. Returns captions/s, percentiles, errors, CPU time, padding and compiles after READY.

        Raises:
            RuntimeError: a caption was wrong, or there was no reply.
        """
        before, cpu = server.metrics(), tree_cpu_seconds(server.pid)
        tallies = self._generate(server)
        used, after = tree_cpu_seconds(server.pid) - cpu, server.metrics()
        latencies = [latency for tally in tallies for latency in tally.latencies]
        counted = ("errors", "wrong", "unanswered")
        errors, wrong, unanswered = (sum(getattr(tally, name) for tally in tallies) for name in counted)
        if wrong or not latencies:
            what = f"{wrong} wrong captions, {errors} errors, {unanswered} unanswered, {len(latencies)} replies"
            raise RuntimeError(f"{what}: {server.log()}")
        elapsed = max(tally.elapsed for tally in tallies)
        measured = {
            "captions_per_s": len(latencies) / elapsed,
            "errors": float(errors + unanswered),
            **percentiles_ms(latencies),
            "server_cpus": used / elapsed,
            "client_cpus": sum(tally.cpu_s for tally in tallies) / elapsed,
            "cpu_ms_per_caption": used / len(latencies) * 1000,
        }
        if after:
            measured["compiles_serving"] = after.get(SERVING_COMPILES, 0.0)
        return {**measured, **padding(before, after)}

    def _generate(self, server: Server) -> list[Tally]:
        """Starts the client processes, lets them begin together, and collects their counts."""
        count, context = min(self.processes, self.clients), multiprocessing.get_context("spawn")
        running, ends = [], []
        for index in range(count):
            clients = self.clients // count + (index < self.clients % count)
            share = replace(self, clients=clients, rate=self.rate / count)
            end, far_end = context.Pipe()
            ends.append(end)
            process = context.Process(target=_clients, args=(far_end, share, server.port, server.api, index))
            process.start()
            running.append(process)
            far_end.close()
        try:
            for end in ends:
                end.recv()
            for end in ends:
                end.send("go")
            return [end.recv() for end in ends]
        except EOFError as error:
            raise RuntimeError("a client process ended before its time") from error
        finally:
            for process in running:
                process.kill()
                process.join()


def _clients(end: "Connection[Any, Any]", load: HttpLoad, port: int, api: Endpoint, seed: int) -> None:
    def wait() -> None:
        end.send("connected")
        end.recv()

    end.send(uvloop.run(generate(load, port, api, seed, wait)))


async def generate(load: HttpLoad, port: int, api: Endpoint, seed: int, wait: Callable[[], object]) -> Tally:
    """Connects the clients, waits for those of the other processes, and lets them send requests."""
    requests = [
        (request_bytes(api.caption, *api.body(image)), (caption or "").encode())
        for image, caption in read_images(load.images)
    ]
    tally, cpu = Tally(), time.process_time()
    clients = await connect(port, load.clients, tally)
    await asyncio.to_thread(wait)
    tally.began = time.perf_counter()
    tally.until = tally.began + load.seconds
    # Requests without a reply at the end are counted, and the latencies of the other ones are kept.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(load.seconds + GRACE_S):
            if load.rate:
                await open_loop(clients, requests, tally, port, load.rate, seed)
            else:
                await closed_loop(clients, requests, tally)
    for client in clients:
        client.close()
    tally.cpu_s = time.process_time() - cpu
    return tally


def padding(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of padding in the rows that each component ran between two scrapes. Empty for a peer."""
    shares = {}
    for component in COMPONENTS:
        label = f'{{component="{component}"}}'
        rows, padded = (
            after.get(f"snapcap_{name}_total{label}", 0.0) - before.get(f"snapcap_{name}_total{label}", 0.0)
            for name in ("rows", "padding_rows")
        )
        if rows:
            shares[f"{component}_padding"] = padded / rows
    return shares
