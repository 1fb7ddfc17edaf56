"""Holds a simulated replica against a real one on this machine, under the same arrivals."""

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

from snapcap.benchmarks.autoscaling.fleet import Autoscaler, Fleet, Replica
from snapcap.benchmarks.harness.common import build_store, scratch, serve_command
from snapcap.benchmarks.harness.measurements import percentile
from snapcap.benchmarks.harness.server import Server, serving
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.load.http_load import start_clients
from snapcap.benchmarks.report.tables import Report, number, percent, ratio

LOADS = (0.3, 0.6, 0.8)  # of the rate that the server had just now
# The simulation knows a lone request and the highest rate, and nothing of scheduling and batches: so far it may be
# off before the table of fleets, whose differences are tens of times, would say something else.
FACTOR = 2.0
CLIENTS = 16
CALIBRATION_S, SECONDS = 5.0, 20.0


def check(options: argparse.Namespace) -> int:
    """Exit status 1 where a percentile differs by more than a factor."""
    with scratch(options.cache) as cache:
        build_store(cache)
        images = open_workload("demo", cache).write_images(cache / "images")
        with serving(serve_command("--cache-dir", str(cache))) as server:
            connection = server.connect()
            server.wait_ready(connection)
            connection.close()
            rows, good = compare(server, images, options.seed)
    report = Report()
    columns = ["load", "requests/s", "", "p50 ms", "p99 ms"]
    report.add("A real replica, and the simulated one under the same arrivals", columns, rows)
    report.write(options.json, {"benchmark": "autoscaling --check", "good": good})
    return 0 if good else 1


def compare(server: Server, images: Path, seed: int) -> tuple[list[list[str]], bool]:
    """Rows of a table, and whether every percentile is within the factor."""
    load(server, images, 1, 1.0)  # does not count
    lone = percentile(sorted(load(server, images, 1, CALIBRATION_S)), 0.5)
    rate = len(load(server, images, CLIENTS, CALIBRATION_S)) / CALIBRATION_S
    replica = Replica("", 0.0, lone, rate, CLIENTS)
    rows, good = [], True
    for share in LOADS:
        due = share * rate
        real = sorted(load(server, images, CLIENTS, SECONDS, due, seed))
        moments = list(open_loop(due, seed, SECONDS))
        simulated = sorted(Fleet(replica, Autoscaler(most=1), 1).run(moments).latencies)
        pairs = [(percentile(real, at), percentile(simulated, at)) for at in (0.5, 0.99)]
        good = good and all(max(a / b, b / a) <= FACTOR for a, b in pairs)
        texts = [[number(value * 1000, 1) for value in values] for values in zip(*pairs, strict=True)]
        rows.append([percent(share), number(due, 0), "real", *texts[0]])
        rows.append(["", "", "simulated", *texts[1]])
        rows.append(["", "", "simulated ÷ real", *(ratio(b, a) for a, b in pairs)])
    return rows, good


def open_loop(rate: float, seed: int, length: float) -> Iterator[float]:
    """The moments of `load.clients`' open loop, in seconds from its beginning."""
    chooser, moment = random.Random(seed), 0.0
    while (moment := moment + chooser.expovariate(rate)) < length:
        yield moment


def load(
    server: Server, images: Path, clients: int, length: float, rate: float = 0.0, seed: int = 0
) -> list[float]:
    """Latencies in seconds of a closed loop, or of an open one with a rate.

    Raises:
        RuntimeError: a request failed, or a caption was wrong.
    """
    further = ("--rate", str(rate), "--seed", str(seed))
    with start_clients(server.port, images, clients, length, *further) as process:
        if process.stdout is None or process.stdout.readline() != "connected\n":
            raise RuntimeError("a load generator could not connect")
        replies = json.loads(process.communicate("go\n", timeout=math.ceil(length) + 90)[0])
    if not replies["latencies"] or replies["errors"] or replies["wrong"] or replies["unanswered"]:
        raise RuntimeError(f"not every request was answered rightly: {server.log()}")
    latencies: list[float] = replies["latencies"]
    return latencies
