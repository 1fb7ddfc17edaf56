"""Measures percentiles of latency over concurrency, in the engine and over HTTP, beside the peers.

Servers run one at a time. Each concurrency is a closed loop of keep-alive clients that send JPEGs of 500 × 375. An
open loop at 70 % of the highest measured rate follows, in which latency counts from the moment a request was due.
The engine of this server is measured in a process of its own, with images decoded before.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from snapcap.benchmarks import contenders as contending
from snapcap.benchmarks.contenders import BACKENDS, TITLES, Contenders
from snapcap.benchmarks.harness.arguments import counts, seconds
from snapcap.benchmarks.harness.load import COMPONENTS, HttpLoad
from snapcap.benchmarks.harness.marks import read_result
from snapcap.benchmarks.harness.report import Report, number, percent, ratio
from snapcap.benchmarks.harness.server import run_measured, steady_caption

DEFAULT = ("aot", "eager", "transformers-eager", "onnxruntime")
DEFAULT_CONCURRENCY = {"cuda": (1, 4, 16, 64, 128), "cpu": (1, 4, 16)}
LOAD = 0.7
# Least average number of requests in the open loop: a slow model may take longer for one than a round is.
LEAST_DUE = 10
ENGINE_LIMIT_S = 600.0
OPEN = "open"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contending.add_arguments(parser, DEFAULT)
    text = "numbers of clients (default: 1,4,16,64,128 on cuda, 1,4,16 on cpu)"
    parser.add_argument("--concurrency", type=counts, metavar="N,N,…", help=text)
    text = "seconds of each concurrency (default: %(default)s)"
    parser.add_argument("--seconds", type=seconds, default=5.0, help=text)
    text = "requests a second of the open loop (default: 70 %% of each server's highest rate)"
    parser.add_argument("--rate", type=seconds, metavar="R", help=text)
    parser.add_argument("--no-http", action="store_true", help="measure the engine only")
    parser.add_argument("--no-engine", action="store_true", help="measure over HTTP only")


def over_http(
    contenders: Contenders, name: str, concurrency: Sequence[int], load: HttpLoad, rate: float | None = None
) -> dict[str, Any]:
    """Measures one server: its first request, every concurrency, and an open loop of `rate` requests a second, or
    else of 70 % of the server's highest rate."""
    image, _ = contenders.workload.first_image
    with contenders.serving(name) as server:
        connection = server.connect()
        server.wait_ready(connection)  # waits here, so that waiting is in neither measurement
        began = time.monotonic()
        reply = server.caption(connection, image)
        first = time.monotonic() - began
        contenders.workload.check(reply.json())
        steady = steady_caption(server, connection, image)
        connection.close()
        most = replace(load, clients=max(concurrency))
        replace(most, seconds=min(2.0, load.seconds)).run(server)  # warms up, and does not count
        measured = {str(clients): replace(load, clients=clients).run(server) for clients in concurrency}
        rate = rate or LOAD * max(each["captions_per_s"] for each in measured.values())
        measured[OPEN] = replace(most, seconds=max(2 * load.seconds, LEAST_DUE / rate), rate=rate).run(server)
        return {"first_ms": first * 1000, "steady_ms": steady * 1000, "load": measured}


def engine(contenders: Contenders, name: str, concurrency: Sequence[int], seconds: float) -> dict[str, Any]:
    """Returns the results of `benchmarks.engine`, in a process of its own."""
    command = [sys.executable, "-m", "snapcap.benchmarks.engine", "--images", str(contenders.images)]
    command += ["--concurrency", ",".join(map(str, concurrency)), "--seconds", str(seconds)]
    return read_result(run_measured([*command, *contenders.options(name)], ENGINE_LIMIT_S).lines)


def run(options: argparse.Namespace, device: str) -> int:
    """Runs the measurement. The exit status is 0 if every server that is installed gave results."""
    concurrency = options.concurrency or list(DEFAULT_CONCURRENCY[device])
    report = Report()
    with ExitStack() as stack:
        contenders = contending.open_contenders(stack, options, device)
        load = HttpLoad(contenders.images, 1, options.seconds, options.processes)

        def measure(name: str) -> dict[str, Any]:
            found = {}
            if name in BACKENDS and not options.no_engine:
                found["engine"] = engine(contenders, name, concurrency, options.seconds)
            if not options.no_http:
                found["http"] = over_http(contenders, name, concurrency, load, options.rate)
            return found

        results = contenders.rounds(options.cases, 1, measure)
    engines = {name: found["engine"] for name, (found,) in results.items() if "engine" in found}
    servers = {name: found["http"] for name, (found,) in results.items() if "http" in found}
    _load_table(report, "Without HTTP", {name: case["concurrency"] for name, case in engines.items()})
    _steps_table(report, {name: case["steps"] for name, case in engines.items()})
    _load_table(report, "Over HTTP", {name: case["load"] for name, case in servers.items()})
    _facts_table(report, servers)
    status = report.add_problems(contenders.problems, TITLES)
    figures = {**flat("engine", engines), **flat("http", servers)}
    about = {"benchmark": "latency", "model": options.model, "device": device, "problems": contenders.problems}
    report.write(options.json, figures, **about)
    return status


def flat(name: str, value: Any) -> dict[str, float]:
    """Returns the numbers in nested dictionaries, by their keys joined with dots."""
    if not isinstance(value, Mapping):
        return {name: float(value)}
    return {key: number for each, inner in value.items() for key, number in flat(f"{name}.{each}", inner).items()}


def _load_table(report: Report, title: str, cases: Mapping[str, Mapping[str, Any]]) -> None:
    names = ("captions_per_s", "p50_ms", "p90_ms", "p99_ms")
    rows = [
        [TITLES[name], size, *(number(measured.get(each), 1) for each in names), number(measured.get("errors"), 0)]
        for name, loads in cases.items()
        for size, measured in loads.items()
    ]
    note = "open: random moments, at --rate or 0.7 of the highest rate; latency from the due moment."
    report.add(title, ["", "clients", "captions/s", "p50 ms", "p90 ms", "p99 ms", "errors"], rows, note)


def _steps_table(report: Report, cases: Mapping[str, Mapping[str, Any]]) -> None:
    sizes = list(dict.fromkeys(size for steps in cases.values() for size in steps))
    rows = [
        [f"{what}, {size} rows", *(number(steps.get(size, {}).get(f"{key}_ms"), 3) for steps in cases.values())]
        for what, key in (("encode", "encode"), ("decode step", "decode_step"), ("a row's move", "move"))
        for size in sizes
        if any(f"{key}_ms" in steps.get(size, {}) for steps in cases.values())
    ]
    note = "Of 20 in a row with one wait for the device at their end, the best of three times."
    report.add("One encode, one decode step, one move", ["ms", *(TITLES[name] for name in cases)], rows, note)


def _facts_table(report: Report, servers: Mapping[str, Any]) -> None:
    rows = []
    for name, case in servers.items():
        last, first, steady = case["load"][OPEN], case["first_ms"], case["steady_ms"]
        padded = [percent(last.get(f"{component}_padding")) for component in COMPONENTS]
        compiles = number(last.get("compiles_serving"), 0)
        rows.append([TITLES[name], number(first, 1), number(steady, 1), ratio(first, steady), compiles, *padded])
    columns = ["", "first ms", "steady ms", "first /steady", "compiles after READY", "padded: encoder", "decoder"]
    report.add("First request after READY, compiles, padding in the open loop", columns, rows)
