"""Measures time to ready, a lone caption and captions/s of this server beside its peers, in one table.

Each round starts every server once, in turn, as a fresh process with empty compiler caches: seconds from exec until
it is ready, then captions one by one, then as many as keep-alive clients get in `--seconds`. Clients send JPEGs of
500 × 375 from processes of their own, which share the CPUs with the server. Every caption is checked if its text is
known. Artifact sets and exports are made before. The time limit, by default five minutes, counts from then on.
"""

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from snapcap.benchmarks import contenders as contending
from snapcap.benchmarks.contenders import BACKENDS, TITLES, Contenders
from snapcap.benchmarks.harness.arguments import count, seconds
from snapcap.benchmarks.harness.load import HttpLoad
from snapcap.benchmarks.harness.processes import tree_memory
from snapcap.benchmarks.harness.report import Column, Report, Samples, ratio
from snapcap.benchmarks.harness.server import serving
from snapcap.benchmarks.harness.workload import fresh_caches, scratch

DEFAULT = ("aot", "transformers-eager", "transformers-batched", "litserve", "onnxruntime", "eager")
TIME_LIMIT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contending.add_arguments(parser, DEFAULT)
    text = "number of keep-alive connections (default: %(default)s)"
    parser.add_argument("--clients", type=count, default=16, metavar="N", help=text)
    text = "seconds of load in each round (default: %(default)s)"
    parser.add_argument("--seconds", type=seconds, default=10.0, help=text)
    parser.add_argument(
        "--rounds", type=count, default=3, help="rounds of all servers in turn (default: %(default)s)"
    )
    parser.set_defaults(time_limit=TIME_LIMIT_S)


def measure(contenders: Contenders, name: str, load: HttpLoad) -> dict[str, float]:
    """Starts one server, measures it, and ends it."""
    with scratch() as folder, serving(*contenders.command(name), fresh_caches(folder)) as server:
        start = contenders.first_captions(server).values
        # For a slower server, the first captions were the warm-up.
        if load.clients * start["steady_ms"] / 1000 < load.seconds:
            replace(load, seconds=1.0).run(server)
        loaded = load.run(server)
        memory = tree_memory(server.pid) / (1 << 20)
    first = {"ready": start["ready"], "first_caption": start["total"], "lone_ms": start["steady_ms"]}
    return {**first, "memory_mib": memory, **loaded}


def run(options: argparse.Namespace, device: str) -> int:
    """Runs the measurement. The exit status is 0 if every server that is installed gave results."""
    report = Report()
    with ExitStack() as stack:
        contenders = contending.open_contenders(stack, options, device)
        # An interruption while something was built has ended the time.
        contenders.end = contenders.end and time.monotonic() + options.time_limit
        load = HttpLoad(contenders.images, options.clients, options.seconds, options.processes)
        found = contenders.rounds(options.cases, options.rounds, lambda name: measure(contenders, name, load))
    results = {name: Samples.of(rounds) for name, rounds in found.items()}
    _table(report, results, options.clients)
    return report.end(options, device, contenders.problems, TITLES, results, clients=options.clients)


def _table(report: Report, results: Mapping[str, Samples], clients: int) -> None:
    peers = [case.median("captions_per_s") for name, case in results.items() if name not in BACKENDS]
    best = max(peers, default=0.0)
    columns: dict[str, Column] = {
        "n": lambda case: str(len(case.values["ready"])),
        "READY s": "ready .2f",
        "caption s": "first_caption .2f",
        "lone ms": "lone_ms .1f",
        "captions/s": "captions_per_s .1f",
        "/peer": lambda case: ratio(case.median("captions_per_s"), best),
        "p50 ms": "p50_ms .0f",
        "p99 ms": "p99_ms .0f",
        "CPU ms each": "cpu_ms_per_caption .1f",
        "MiB": "memory_mib .0f",
        "errors": lambda case: f"{sum(case.values['errors']):.0f}",
    }
    note = (
        "Medians of n rounds. READY and the first caption: since exec. lone: one caption at a time. captions/s, "
        f"p50 and p99: {clients} clients, JPEGs of 500 × 375. /peer: to the best peer. MiB: proportional set size "
        "of all its processes under load."
    )
    cases = {TITLES[name]: case for name, case in results.items()}
    report.add_cases("This server and its peers", cases, columns, note)
