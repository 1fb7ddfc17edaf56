"""Measures percentiles of latency over concurrency, in the engine and over HTTP, beside the peers.

Servers run one at a time. Each concurrency is a closed loop of keep-alive clients that send JPEGs of 500 × 375. An
open loop at 70 % of the highest measured rate follows, in which latency counts from the moment a request was due.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from snapcap.benchmarks.harness.arguments import counts, seconds
from snapcap.benchmarks.load import contenders as contending
from snapcap.benchmarks.load.contenders import BACKENDS, COMPONENTS, TITLES, Contenders, HttpLoad, engine_title
from snapcap.benchmarks.report.charts import Line, draw_latency
from snapcap.benchmarks.report.tables import Report, number, percent, ratio
from snapcap.benchmarks.startup.start import steady_caption

DEFAULT = ("aot", "eager", "transformers-eager", "onnxruntime")
DEFAULT_CONCURRENCY = {"cuda": (1, 4, 16, 64, 128), "cpu": (1, 4, 16)}
LOAD = 0.7
# Least average number of requests in the open loop: a slow model may take longer for one than a round is.
LEAST_DUE = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contending.add_arguments(parser, DEFAULT)
    parser.add_argument(
        "--concurrency",
        type=counts,
        metavar="N,N,…",
        help="numbers of clients (default: 1,4,16,64,128 on cuda, 1,4,16 on cpu)",
    )
    parser.add_argument(
        "--seconds", type=seconds, default=5.0, help="seconds of each concurrency (default: %(default)s)"
    )


def over_http(
    contenders: Contenders, name: str, concurrency: Sequence[int], seconds: float, processes: int
) -> dict[str, Any]:
    """Measures one server: its first request, every concurrency, and 70 % of its highest rate."""
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

        def load(clients: int, seconds: float, rate: float = 0.0) -> dict[str, float]:
            return HttpLoad(contenders.images, clients, seconds, processes, rate).run(server)

        load(max(concurrency), min(2.0, seconds))  # warms up, and does not count
        closed = {clients: load(clients, seconds) for clients in concurrency}
        highest = max(measured["captions_per_s"] for measured in closed.values())
        rate = LOAD * highest
        opened = load(max(concurrency), max(2 * seconds, LEAST_DUE / rate), rate)
        return {
            "first_ms": first * 1000,
            "steady_ms": steady * 1000,
            "first_to_steady": first / steady,
            "closed": {str(clients): measured for clients, measured in closed.items()},
            "highest_per_s": highest,
            "at_70_percent": opened,
        }


def run(options: argparse.Namespace, device: str) -> int:
    """Runs the measurement. The exit status is 0 if every contender that is installed gave results."""
    concurrency = options.concurrency or list(DEFAULT_CONCURRENCY[device])
    console = Console(stderr=True, highlight=False)
    report, engine, http = Report(), {}, {}
    with ExitStack() as stack:
        contenders = contending.open_contenders(stack, options, device)
        for name in [case for case in options.cases if case not in contenders.problems]:
            with contenders.attempt(name), console.status(name):
                measured = {} if options.no_engine else contenders.engine(name, concurrency, options.seconds)
                if measured:
                    engine[name] = measured
                if not options.no_http:
                    http[name] = over_http(contenders, name, concurrency, options.seconds, options.processes)
            console.print(f"{name}: {contenders.problems.get(name, 'done')}")
    _engine_table(report, engine)
    _steps_table(report, engine)
    _http_table(report, http)
    status = contenders.add_problems(report)
    if options.png is not None:
        draw_latency(_lines(engine, http), options.png, f"{options.model} on {device}")
    raw = {"benchmark": "latency", "model": options.model, "device": device, "problems": contenders.problems}
    report.write(options.json, {**raw, "engine": engine, "http": http})
    return status


def _percentiles(measured: Mapping[str, float]) -> list[str]:
    return [number(measured.get(name), 1) for name in ("captions_per_s", "p50_ms", "p90_ms", "p99_ms")]


def _engine_table(report: Report, engine: Mapping[str, Any]) -> None:
    rows = [
        [engine_title(name), size, *_percentiles(measured)]
        for name, case in engine.items()
        for size, measured in case["concurrency"].items()
    ]
    note = (
        "In one process, images decoded before: scheduler and device thread of this server, each client asking "
        "again when it has its caption; of peers, one whole batch of that size after the other."
    )
    report.add("Without HTTP", ["", "clients", "captions/s", "p50 ms", "p90 ms", "p99 ms"], rows, note)


def _steps_table(report: Report, engine: Mapping[str, Any]) -> None:
    cases = {name: case["steps"] for name, case in engine.items() if "steps" in case}
    sizes = list(dict.fromkeys(size for steps in cases.values() for size in steps))
    rows = [
        [f"{what}, {size} rows", *(number(steps.get(size, {}).get(f"{key}_ms"), 3) for steps in cases.values())]
        for what, key in (("encode", "encode"), ("decode step", "decode_step"), ("a row's move", "move"))
        for size in sizes
        if any(f"{key}_ms" in steps.get(size, {}) for steps in cases.values())
    ]
    columns = ["ms", *(TITLES[name] for name in cases)]
    note = "Of 20 in a row with one wait for the device at their end, the best of three times."
    report.add("One encode, one decode step, one move", columns, rows, note)


def _http_table(report: Report, http: Mapping[str, Any]) -> None:
    rows = []
    for name, case in http.items():
        for clients, measured in case["closed"].items():
            rows.append([TITLES[name], clients, *_percentiles(measured), number(measured["errors"], 0)])
        opened = case["at_70_percent"]
        rows.append([TITLES[name], "70 % load", *_percentiles(opened), number(opened["errors"], 0)])
    columns = ["", "clients", "captions/s", "p50 ms", "p90 ms", "p99 ms", "errors"]
    note = "JPEGs of 500 × 375. 70 % load: random moments at 0.7 of the highest rate above, from the due moment."
    report.add("Over HTTP, JPEGs of 500 × 375", columns, rows, note)
    facts = [
        [
            TITLES[name],
            number(case["first_ms"], 1),
            number(case["steady_ms"], 1),
            ratio(case["first_to_steady"], 1.0),
            number(case["at_70_percent"].get("compiles_serving"), 0),
            *(percent(case["at_70_percent"].get(f"{component}_padding")) for component in COMPONENTS),
        ]
        for name, case in http.items()
    ]
    columns = ["", "first ms", "steady ms", "first /steady", "compiles after READY", "padded: encoder", "decoder"]
    report.add("First request after READY, compiles, padding at 70 % load", columns, facts)


def _lines(engine: Mapping[str, Any], http: Mapping[str, Any]) -> list[Line]:
    """Returns a line for each contender's engine and HTTP. Batches of `generate` are left out, because they are no
    clients."""
    sources = [
        (f"{TITLES[name]}, engine", case["concurrency"]) for name, case in engine.items() if name in BACKENDS
    ]
    sources += [(f"{TITLES[name]}, HTTP", case["closed"]) for name, case in http.items()]
    return [
        Line(title, [(int(size), measured["p50_ms"], measured["p99_ms"]) for size, measured in case.items()])
        for title, case in sources
    ]
