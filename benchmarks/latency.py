"""Measures percentiles of latency over concurrency, in the engine and over HTTP, beside the peers.

Servers run one at a time. Each concurrency is a closed loop of keep-alive clients that send JPEGs of 500 × 375. An
open loop at 70 % of the highest measured rate follows, in which latency counts from the moment a request was due.
The engine of this server is measured in a process of its own, with images decoded before.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import reduce
from typing import Any

from snapcap.benchmarks.contenders import BACKENDS, TITLES, Contenders, open_contenders
from snapcap.benchmarks.harness.arguments import add_serve, counts, seconds
from snapcap.benchmarks.harness.load import HttpLoad
from snapcap.benchmarks.harness.report import Column, Report, Samples, ratio
from snapcap.benchmarks.harness.server import Server, run_measured

DEFAULT = ("aot", "eager", "transformers-eager", "onnxruntime")
DEFAULT_CONCURRENCY = {"cuda": (1, 4, 16, 64, 128), "cpu": (1, 4, 16)}
LOAD = 0.7
# Least average number of requests in the open loop: a slow model may take longer for one than a round is.
LEAST_DUE = 10
ENGINE_LIMIT_S = 600.0
OPEN = "open"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serve(parser)
    text = "numbers of clients (default: 1,4,16,64,128 on cuda, 1,4,16 on cpu)"
    parser.add_argument("--concurrency", type=counts, metavar="N,N,…", help=text)
    text = "seconds of each concurrency (default: %(default)s)"
    parser.add_argument("--seconds", type=seconds, default=5.0, help=text)
    parser.add_argument("--no-http", action="store_true", help="measure the engine only")
    parser.add_argument("--no-engine", action="store_true", help="measure over HTTP only")


def over_http(contenders: Contenders, name: str, concurrency: Sequence[int], load: HttpLoad) -> dict[str, Any]:
    """Measures one server: its first request, every concurrency, and an open loop at 70 % of the server's
    highest rate."""
    with closing(Server(*contenders.command(name))) as server:
        start = contenders.first_captions(server).values
        most = replace(load, clients=max(concurrency))
        replace(most, seconds=min(2.0, load.seconds)).run(server)  # warms up, and does not count
        measured = {str(clients): replace(load, clients=clients).run(server) for clients in concurrency}
        rate = LOAD * max(each["captions_per_s"] for each in measured.values())
        measured[OPEN] = replace(most, seconds=max(2 * load.seconds, LEAST_DUE / rate), rate=rate).run(server)
        first = start["total"] - start["ready"]
        return {"first_ms": first * 1000, "steady_ms": start["steady_ms"], "load": measured}


def engine(contenders: Contenders, name: str, concurrency: Sequence[int], seconds: float) -> dict[str, Any]:
    """Returns the results of `benchmarks.engine`, in a process of its own."""
    command = [sys.executable, "-m", "snapcap.benchmarks.engine", "--images", str(contenders.workload.images)]
    command += ["--concurrency", ",".join(map(str, concurrency)), "--seconds", str(seconds)]
    return run_measured([*command, *contenders.options(name)], ENGINE_LIMIT_S)[1]


def run(options: argparse.Namespace, device: str) -> int:
    """Runs the measurement. The exit status is 0 if every server that is installed gave results."""
    concurrency = options.concurrency or list(DEFAULT_CONCURRENCY[device])
    report = Report()
    with open_contenders(options, device) as contenders:
        load = HttpLoad(contenders.workload.images, 1, options.seconds)

        def measure(name: str) -> dict[str, Any]:
            found = {}
            if name in BACKENDS and not options.no_engine:
                found["engine"] = engine(contenders, name, concurrency, options.seconds)
            if not options.no_http:
                found["http"] = over_http(contenders, name, concurrency, load)
            return found

        results = contenders.rounds(options.cases, 1, measure)
    tables(report, results)
    kinds = {
        kind: Samples.of([flat({name: found[kind] for name, (found,) in results.items() if kind in found})])
        for kind in ("engine", "http")
    }
    return report.end(options, device, contenders.problems, TITLES, kinds)


def flat(value: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers in nested dictionaries, by their keys joined with dots."""
    found: dict[str, float] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            found |= {f"{key}.{name}": each for name, each in flat(inner).items()}
        else:
            found[key] = float(inner)
    return found


def tables(report: Report, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Adds a table for each kind of measurement, with a row for each case and size."""

    def rows(*path: str) -> dict[str, Samples]:
        found = {}
        for name, (measured,) in results.items():
            for size, values in reduce(lambda part, key: part.get(key, {}), path, measured).items():
                found[f"{TITLES[name]}, {size}"] = Samples.of([values])
        return found

    load: dict[str, Column] = {"captions/s": "captions_per_s .1f"}
    load |= {f"p{share} ms": f"p{share}_ms .1f" for share in (50, 90, 99)}
    report.add_cases("Without HTTP, by number of clients", rows("engine", "concurrency"), load)
    steps: dict[str, Column] = {
        "encode ms": "encode_ms .3f",
        "step ms": "decode_step_ms .3f",
        "move ms": "move_ms .3f",
    }
    note = "Mean of 20 in a row with one wait for the device at their end, the best of three times."
    report.add_cases("One encode, one decode step, one row's move, by bucket", rows("engine", "steps"), steps, note)
    load |= {"errors": "errors .0f", "compiles": "compiles_serving .0f"}
    note = f"{OPEN}: random moments, at 0.7 of the highest rate; latency from the due moment."
    report.add_cases("Over HTTP, by number of clients", rows("http", "load"), load, note)
    cases = {TITLES[name]: found["http"] for name, (found,) in results.items() if "http" in found}
    lone = {name: Samples({key: [case[key]] for key in ("first_ms", "steady_ms")}) for name, case in cases.items()}
    columns: dict[str, Column] = {"first ms": "first_ms .1f", "steady ms": "steady_ms .1f"}
    columns["first /steady"] = lambda case: ratio(case.median("first_ms"), case.median("steady_ms"))
    report.add_cases("A lone caption, the first after READY and later ones", lone, columns)
