"""Holds a simulated server against a real one on this machine, under the same arrivals.

First the real one is asked as fast as it answers, which is the rate of which the loads are shares. Then it gets
arrivals at each of them, and a simulated one the same: with the CPU time that the real one's processes took
meanwhile, and with how long a lone request waits while none of them works. CPU time is taken load by load, as the
same work takes more of it on CPUs that are idle most of the time: their caches and clocks are cold. What the load
generator and other programs take of the CPUs is measured and simulated, too.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from snapcap.benchmarks.autoscaling.calibrate import (
    Buckets,
    OtherThreads,
    Usage,
    costs_of,
    decode_steps,
    measure_buckets,
)
from snapcap.benchmarks.autoscaling.engine_model import ServerCosts, ServerModel
from snapcap.benchmarks.autoscaling.fleet import Autoscaler, Fleet, Replica
from snapcap.benchmarks.harness.common import build_store, scratch, serve_command
from snapcap.benchmarks.harness.measurements import percentile
from snapcap.benchmarks.harness.processes import cpu_seconds, own_parts
from snapcap.benchmarks.harness.server import Server, serving
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.load.http_load import start_clients
from snapcap.benchmarks.report.tables import Report, number, percent, ratio

# Of the rate that the server had just now. Beyond, a request waits twice as long where the CPUs are a tenth slower,
# which shared ones are from one second to the next.
LOADS = (0.3, 0.5, 0.7)
TOLERANCE = 1.3  # the factor by which p50 and p99 of the simulated server may be off
CLIENTS = 16
CALIBRATION_S, SECONDS = 5.0, 40.0


@dataclass(frozen=True)
class Measured:
    """What a stretch of load came to: seconds of each request, in order of their ends; CPU seconds of the load
    generator; threads of other programs that had work, on average; and what the server did meanwhile."""

    latencies: list[float]
    client: float
    others: float
    used: Usage

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.used.at

    def costs(self, buckets: Buckets) -> ServerCosts:
        return costs_of(self.used, len(self.latencies), self.client, buckets)

    def at(self, share: float) -> float:
        return percentile(sorted(self.latencies), share)


def check(options: argparse.Namespace) -> int:
    """Exit status 1 where a percentile of the simulated server is off by more than the tolerance."""
    with scratch(options.cache) as cache:
        build_store(cache)
        images = open_workload("demo", cache).write_images(cache / "images")
        buckets = measure_buckets(cache, images)
        with serving(serve_command("--cache-dir", str(cache))) as server:
            connection = server.connect()
            server.wait_ready(connection)
            connection.close()
            rows, good, costs = compare(server, images, buckets, options.seed)
    report = Report()
    columns = ["load", "requests/s", "other threads", "", "p50 ms", "p99 ms"]
    report.add("A real server, and simulated ones under the same arrivals", columns, rows)
    by_load = {percent(share): vars(each) for share, each in costs.items()}
    report.write(options.json, {"benchmark": "autoscaling --check", "good": good, "costs": by_load})
    return 0 if good else 1


def compare(
    server: Server, images: Path, buckets: Buckets, seed: int
) -> tuple[list[list[str]], bool, dict[float, ServerCosts]]:
    """Rows of a table, whether every percentile is within the tolerance, and what the server cost at each load."""
    sizes = tuple(buckets.encode)
    load(server, images, sizes, 1, 1.0)  # does not count
    alone = load(server, images, sizes, 1, CALIBRATION_S)
    busy = load(server, images, sizes, CLIENTS, CALIBRATION_S)
    steps = decode_steps(server, images)
    hand_over = idle_seconds(alone, buckets, steps)
    of_fleets = Replica("", 0.0, alone.at(0.5), busy.rate, CLIENTS)
    rows, good, costs = [], True, dict[float, ServerCosts]()
    for share in LOADS:
        due = share * busy.rate
        real = load(server, images, sizes, CLIENTS, SECONDS, due, seed)
        moments = list(open_loop(due, seed, SECONDS))
        costs[share] = replace(real.costs(buckets), hand_over=hand_over, others=real.others)
        simulated = sorted(ServerModel(costs[share], steps).open_loop(moments))
        simple = sorted(Fleet(of_fleets, Autoscaler(most=1), 1).run(moments).latencies)
        measured, found, plain = (
            [percentile(ordered, at) for at in (0.5, 0.99)]
            for ordered in (sorted(real.latencies), simulated, simple)
        )
        ratios = [b / a for a, b in zip(measured, found, strict=True)]
        good = good and all(1 / TOLERANCE <= each <= TOLERANCE for each in ratios)
        rows += [
            [percent(share), number(due, 0), number(real.others, 1), "real", *_ms(measured)],
            ["", "", "", "simulated", *_ms(found)],
            ["", "", "", "simulated ÷ real", *map(ratio, found, measured)],
            ["", "", "", "as in fleets", *_ms(plain)],
        ]
    return rows, good, costs


def idle_seconds(alone: Measured, buckets: Buckets, steps: Sequence[int]) -> float:
    """How long none of the server's processes works on a lone request: what is left of its time without their CPU
    time. Not below zero, where the two are as good as equal."""
    costs = alone.costs(buckets)
    # Its processes work one after the other, so it is one thread beside the others.
    stretched = max(1.0, (1 + alone.others) / costs.cpus)
    return max(alone.at(0.5) - stretched * mean(map(costs.lone, steps)), 0.0)


def _ms(values: Sequence[float]) -> list[str]:
    return [number(value * 1000, 1) for value in values]


def open_loop(rate: float, seed: int, length: float) -> Iterator[float]:
    """The moments of `load.clients`' open loop, in seconds from its beginning."""
    chooser, moment = random.Random(seed), 0.0
    while (moment := moment + chooser.expovariate(rate)) < length:
        yield moment


def load(
    server: Server,
    images: Path,
    sizes: Sequence[int],
    clients: int,
    length: float,
    rate: float = 0.0,
    seed: int = 0,
) -> Measured:
    """A closed loop, or an open one with a rate. ``sizes``: the server's buckets.

    Raises:
        RuntimeError: a request failed, or a caption was wrong.
    """
    further = ("--rate", str(rate), "--seed", str(seed))
    with start_clients(server.port, images, clients, length, *further) as process:
        if process.stdout is None or process.stdout.readline() != "connected\n":
            raise RuntimeError("a load generator could not connect")
        started = cpu_seconds(process.pid)
        before = Usage.now(server, sizes)
        with OtherThreads([server.pid, *own_parts(server.pid), process.pid]) as others:
            replies = json.loads(process.communicate("go\n", timeout=math.ceil(length) + 90)[0])
        used = Usage.now(server, sizes).since(before)
    if not replies["latencies"] or replies["errors"] or replies["wrong"] or replies["unanswered"]:
        raise RuntimeError(f"not every request was answered rightly: {server.log()}")
    return Measured(replies["latencies"], max(replies["cpu_s"] - started, 0.0), others.mean, used)
