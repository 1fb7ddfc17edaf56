"""Puts a server under HTTP load from processes of their own, which share the CPUs with the measured server.

In a closed loop, each client is a keep-alive connection that sends the next image as soon as it has its caption.
With a rate the loop is open: requests are due at random moments (Poisson), however long the replies take, and
latency counts from the moment a request was due. The clients' connections serve the open loop, and more are opened
if all are busy.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from threading import Barrier

import uvloop

from snapcap.benchmarks.harness.processes import tree_cpu_seconds
from snapcap.benchmarks.harness.report import percentiles_ms
from snapcap.benchmarks.harness.server import AsyncConnection, Endpoint, Server, request_bytes
from snapcap.benchmarks.harness.workload import read_images
from snapcap.warmup.machine.capacity import available_cpus

GRACE_S = 120.0  # time for the last replies after the load has ended
Request = tuple[bytes, bytes]  # a whole request, and the text that its reply must contain


@dataclass
class Tally:
    """The counts of all clients, from ``began`` to the ``last`` reply. Latencies are in seconds, of the replies to
    requests due before ``until``."""

    began: float = 0.0
    until: float = 0.0
    last: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: int = 0
    unanswered: int = 0  # requests under way


async def ask(client: AsyncConnection, request: Request, due: float, tally: Tally) -> bool:
    """Sends a request and counts its reply. Returns False if the connection is lost."""
    tally.unanswered += 1
    try:
        reply = await client.ask(request[0])
    except OSError:
        reply = None
    tally.unanswered -= 1
    if reply is None or reply.status != 200:
        tally.errors += 1
    else:
        tally.wrong += request[1] not in reply.body
        tally.last = time.perf_counter()
        tally.latencies.append(tally.last - due)
    return reply is not None


async def closed_loop(clients: list[AsyncConnection], requests: list[Request], tally: Tally) -> None:
    """Lets every client send a request as soon as it has its reply. Requests sent in time count, however late the
    reply."""

    async def one(client: AsyncConnection, turn: int) -> None:
        while time.perf_counter() < tally.until:
            if not await ask(client, requests[turn % len(requests)], time.perf_counter(), tally):
                return
            turn += 1

    await asyncio.gather(*(one(client, first) for first, client in enumerate(clients)))


async def open_loop(
    clients: list[AsyncConnection], requests: list[Request], tally: Tally, port: int, rate: float, seed: int
) -> None:
    """Sends requests at random moments, on average ``rate`` a second. Every request counts."""
    chooser, idle, under_way = random.Random(seed), list(clients), set()
    due = time.perf_counter()

    async def one(turn: int, due: float) -> None:
        client = idle.pop() if idle else await AsyncConnection.open(port)
        if await ask(client, requests[turn % len(requests)], due, tally):
            idle.append(client)

    for turn in itertools.count():
        due += chooser.expovariate(rate)
        if due >= tally.until:
            break
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        task = asyncio.create_task(one(turn, due))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)


@dataclass(frozen=True)
class HttpLoad:
    """A load of ``clients``, split among processes. ``rate`` is requests a second of an open loop, or 0."""

    images: Path
    clients: int
    seconds: float
    rate: float = 0.0

    def run(self, server: Server) -> dict[str, float]:
        """Runs the load once. Returns captions/s, percentiles, errors, CPU time and compiles after READY.

        Raises:
            RuntimeError: a caption was wrong, or there was no reply.
        """
        cpu = tree_cpu_seconds(server.pid)
        tallies = self._generate(server)
        used = tree_cpu_seconds(server.pid) - cpu
        latencies = [latency for tally in tallies for latency in tally.latencies]
        counted = ("errors", "wrong", "unanswered")
        errors, wrong, unanswered = (sum(getattr(tally, name) for tally in tallies) for name in counted)
        if wrong or not latencies:
            what = f"{wrong} wrong captions, {errors} errors, {unanswered} unanswered, {len(latencies)} replies"
            raise RuntimeError(f"{what}: {server.log()}")
        elapsed = max(tally.last - tally.began for tally in tallies)
        return {
            "captions_per_s": len(latencies) / elapsed,
            "errors": float(errors + unanswered),
            **percentiles_ms(latencies),
            "cpu_ms_per_caption": used / len(latencies) * 1000,
            **server.compiles(),
        }

    def _generate(self, server: Server) -> list[Tally]:
        """Starts the client processes, which begin together, and returns their counts."""
        # Clients with one process for four CPUs, at most 8, keep up with a server without taking its CPUs.
        count = min(max(available_cpus() // 4, 1), 8, self.clients)
        numbers = [self.clients // count + (index < self.clients % count) for index in range(count)]
        shares = [replace(self, clients=number, rate=self.rate / count) for number in numbers]
        context = multiprocessing.get_context("spawn")
        # Each process has one share, as it waits for the other processes before it begins.
        with context.Manager() as manager, ProcessPoolExecutor(count, context) as pool:
            same = (server.port, server.api, manager.Barrier(count))
            return list(pool.map(_clients, shares, range(count), *map(repeat, same)))


def _clients(load: HttpLoad, seed: int, port: int, api: Endpoint, begin: Barrier) -> Tally:
    return uvloop.run(generate(load, port, api, seed, begin.wait))


async def generate(load: HttpLoad, port: int, api: Endpoint, seed: int, wait: Callable[[], object]) -> Tally:
    """Connects the clients, waits for those of the other processes, and lets them send requests."""
    requests = [
        (request_bytes(api.caption, *api.body(image)), (caption or "").encode())
        for image, caption in read_images(load.images)
    ]
    tally = Tally()
    clients = [await AsyncConnection.open(port) for _ in range(load.clients)]
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
    return tally
