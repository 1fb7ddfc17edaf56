"""Measures captions/s in the engine and over HTTP, beside the peers.

All servers run from the beginning, and take turns under load, one at a time. Clients send JPEGs of 500 × 375 over
keep-alive connections, from processes of their own that share the CPUs. Every caption is checked if its text is
known.
"""

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console

from snapcap.benchmarks.harness.arguments import count, seconds
from snapcap.benchmarks.harness.measurements import Samples, interleave
from snapcap.benchmarks.harness.server import Server
from snapcap.benchmarks.load import contenders as contending
from snapcap.benchmarks.load.contenders import BACKENDS, COMPONENTS, TITLES, Contenders, HttpLoad, engine_title
from snapcap.benchmarks.report.charts import draw_bars
from snapcap.benchmarks.report.tables import Report, number, per_second, percent, ratio

DEFAULT = ("aot", "eager", "transformers-eager", "transformers-1-thread", "onnxruntime")
DEFAULT_CLIENTS = {"cuda": 128, "cpu": 16}
WARM_UP_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contending.add_arguments(parser, DEFAULT)
    text = "number of keep-alive connections (default: 128 on cuda, 16 on cpu)"
    parser.add_argument("--clients", type=count, metavar="N", help=text)
    parser.add_argument(
        "--seconds", type=seconds, default=10.0, help="seconds of each round (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=count, default=3, help="rounds of all servers in turn (default: %(default)s)"
    )


class Servers:
    """Servers that run from the beginning and take turns under load. A server that fails is left out and
    recorded."""

    def __init__(self, contenders: Contenders, stack: ExitStack) -> None:
        self._contenders = contenders
        self._stack = stack
        self._servers: dict[str, Server] = {}

    def open(self, names: list[str], load: HttpLoad) -> None:
        """Starts all servers, and warms each up with a load that does not count."""
        for name in names:
            with self._contenders.attempt(name):
                server = self._stack.enter_context(self._contenders.serving(name))
                self._contenders.first_caption(server).close()
                replace(load, seconds=WARM_UP_S).run(server)
                self._servers[name] = server

    def run(self, load: HttpLoad, rounds: int) -> dict[str, Samples]:
        """Loads every server in turn, ``rounds`` times. Records a server whose turn never came."""

        def case(server: Server) -> Callable[[], Mapping[str, float]]:
            return lambda: load.run(server)

        results = interleave(rounds, {name: case(server) for name, server in self._servers.items()})
        for name in self._servers:
            if name not in results:
                self._contenders.problems[name] = "not measured: interrupted"
        return results


def run(options: argparse.Namespace, device: str) -> int:
    """Runs the measurement. The exit status is 0 if every contender that is installed gave results."""
    clients = options.clients or DEFAULT_CLIENTS[device]
    console = Console(stderr=True, highlight=False)
    report, engine, http = Report(), {}, {}
    with ExitStack() as stack:
        contenders = contending.open_contenders(stack, options, device)
        names = [name for name in options.cases if name not in contenders.problems]
        for name in () if options.no_engine else names:
            with contenders.attempt(name), console.status(f"{name}: engine"):
                measured = contenders.engine(name, [clients], options.seconds)
                if measured:
                    engine[name] = measured
        if not options.no_http:
            load = HttpLoad(contenders.images, clients, options.seconds, options.processes)
            servers = Servers(contenders, stack)
            servers.open(names, load)
            http = servers.run(load, options.rounds)
    _engine_table(report, engine)
    _http_table(report, http, options, clients)
    status = contenders.add_problems(report)
    if options.png is not None:
        rates = {TITLES[name]: case.need("captions_per_s") for name, case in http.items()}
        draw_bars(rates, options.png, "captions/s over HTTP")
    raw = {"benchmark": "throughput", "model": options.model, "device": device, "problems": contenders.problems}
    samples = {name: case.values for name, case in http.items()}
    report.write(options.json, {**raw, "engine": engine, "samples": samples})
    return status


def _engine_table(report: Report, engine: Mapping[str, Any]) -> None:
    rows = []
    for name, case in engine.items():
        ((size, measured),) = case["concurrency"].items()
        rate = per_second(measured["captions_per_s"])
        rows.append([engine_title(name), size, rate, number(measured["p50_ms"], 1)])
    note = "In one process, images decoded before; of peers, whole batches of that size."
    report.add("Without HTTP", ["", "clients", "captions/s", "p50 ms"], rows, note)


def _http_table(report: Report, http: Mapping[str, Samples], options: argparse.Namespace, clients: int) -> None:
    peers = [case.need("captions_per_s") for name, case in http.items() if name not in BACKENDS]
    best = max(peers, default=None)
    rows = []
    for name, case in http.items():
        rate = case.need("captions_per_s")
        rows.append(
            [
                TITLES[name],
                per_second(rate),
                ratio(rate, best),
                *(number(case.need(f"p{share}_ms"), 1) for share in (50, 90, 99)),
                *(percent(case.median(f"{component}_padding")) for component in COMPONENTS),
                number(case.need("cpu_ms_per_caption"), 2),
                number(case.need("server_cpus")),
                number(case.need("client_cpus")),
                number(sum(case.values["errors"]), 0),
                number(max(case.values.get("compiles_serving", [0.0])), 0) if name in BACKENDS else "",
            ]
        )
    columns = ["", "captions/s", "/peer", "p50 ms", "p90 ms", "p99 ms", "padded: encoder", "decoder"]
    columns += ["CPU ms each", "CPUs", "clients'", "errors", "compiles"]
    note = (
        f"Medians of {options.rounds} alternating rounds of {options.seconds:g} s; /peer: to the best peer; CPUs: "
        f"used by the server, and by the {options.processes} client process(es); padded: rows padded / rows run; "
        "compiles: graphs compiled after READY."
    )
    report.add(f"Over HTTP: {clients} keep-alive clients, JPEGs of 500 × 375", columns, rows, note)
