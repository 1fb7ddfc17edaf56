"""Puts a server under HTTP load from processes of their own, which share the CPUs with the measured server.

    python -m snapcap.benchmarks.harness.load --port 8000 --path /v1/caption --images FOLDER --clients 16
        --seconds 10

In a closed loop, each client is a keep-alive connection that sends the next image as soon as it has its caption.
With ``--rate`` the loop is open: requests are due at random moments (Poisson), however long the replies take, and
latency counts from the moment a request was due. ``--clients`` connections serve the open loop, and more are
opened if all are busy.

The program connects, prints a line, waits for a line on its standard input, and finally prints one JSON line. The
JSON holds the latencies of the replies and the time until the last one in seconds, the numbers of wrong captions,
errors, and requests without a reply a minute after the end, and the program's CPU seconds.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvloop

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.processes import tree_cpu_seconds
from snapcap.benchmarks.harness.report import percentiles_ms
from snapcap.benchmarks.harness.server import Endpoint, Server, request_bytes
from snapcap.benchmarks.harness.workload import ROOT, environment, read_images

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
    statuses: dict[str, int] = field(default_factory=dict)


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
            tally.statuses[status.decode()] = tally.statuses.get(status.decode(), 0) + 1
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


async def run(options: argparse.Namespace) -> Tally:
    body = Endpoint(options.path, None, options.takes_json).body
    requests = [
        (request_bytes(options.path, *body(image)), (caption or "").encode())
        for image, caption in read_images(options.images)
    ]
    tally = Tally()
    clients = await connect(options.port, options.clients, tally)
    print("connected", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    tally.began = time.perf_counter()
    tally.until = tally.began + options.seconds
    # Requests without a reply at the end are counted, and the latencies of the other ones are kept.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(options.seconds + options.grace):
            if options.rate:
                await open_loop(clients, requests, tally, options.port, options.rate, options.seed)
            else:
                await closed_loop(clients, requests, tally)
    for client in clients:
        client.close()
    return tally


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
        replies = self._generate(server)
        used, after = tree_cpu_seconds(server.pid) - cpu, server.metrics()
        latencies = [latency for reply in replies for latency in reply["latencies"]]
        counted = ("errors", "wrong", "unanswered")
        errors, wrong, unanswered = (sum(reply[name] for reply in replies) for name in counted)
        if wrong or not latencies:
            what = f"{wrong} wrong captions, {errors} errors, {unanswered} unanswered, {len(latencies)} replies"
            raise RuntimeError(f"{what}: {server.log()}")
        elapsed = max(reply["elapsed"] for reply in replies)
        measured = {
            "captions_per_s": len(latencies) / elapsed,
            "errors": float(errors + unanswered),
            **percentiles_ms(latencies),
            "server_cpus": used / elapsed,
            "client_cpus": sum(reply["cpu_s"] for reply in replies) / elapsed,
            "cpu_ms_per_caption": used / len(latencies) * 1000,
        }
        if after:
            measured["compiles_serving"] = after.get(SERVING_COMPILES, 0.0)
        return {**measured, **padding(before, after)}

    def _generate(self, server: Server) -> list[dict[str, Any]]:
        """Starts the client processes, lets them begin together, and collects their counts."""
        count = min(self.processes, self.clients)
        running = [self._client(server, index, count) for index in range(count)]
        try:
            for process in running:
                if process.stdout is None or process.stdout.readline() != "connected\n":
                    raise RuntimeError("a load generator could not connect")
            for process in running:
                if process.stdin is not None:
                    process.stdin.write("go\n")
                    process.stdin.flush()
            return [json.loads(process.communicate()[0]) for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()

    def _client(self, server: Server, index: int, count: int) -> "subprocess.Popen[str]":
        share = self.clients // count + (index < self.clients % count)
        command = [sys.executable, "-m", "snapcap.benchmarks.harness.load", "--port", str(server.port)]
        command += ["--path", server.api.caption, "--images", str(self.images), "--clients", str(share)]
        command += ["--takes-json"] * server.api.takes_json
        command += ["--seconds", str(self.seconds), "--rate", str(self.rate / count), "--seed", str(index)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, text=True)


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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/caption")
    parser.add_argument("--takes-json", action="store_true", help="send images as base64 in JSON")
    parser.add_argument("--images", type=Path, required=True, help="folder with images and captions.json")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second of an open loop")
    parser.add_argument("--grace", type=float, default=GRACE_S, help="seconds that the last replies may take")
    parser.add_argument("--seed", type=int, default=0, help="seed of the open loop's moments")
    options = parser.parse_args()
    tally = uvloop.run(run(options))
    elapsed = max(tally.last - tally.began, 0.0)
    result = {**vars(tally), "elapsed": elapsed, "cpu_s": time.process_time()}
    # `print` is not used: with unbuffered output, Python may cut a line longer than the pipe short.
    with open(sys.stdout.fileno(), "wb", closefd=False) as output:
        output.write(json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    main()
