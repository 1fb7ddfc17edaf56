"""Measures time to ready, a lone caption and captions/s of this server beside its peers, in one table.

Each round starts every server once, in turn, as a fresh process with empty compiler caches: seconds from exec until
it is ready, then captions one by one, then as many as keep-alive clients get in `--seconds`. Clients send JPEGs of
500 × 375 from processes of their own, which share the CPUs with the server. Every caption is checked if its text is
known. Artifact sets and exports are made before. The time limit, by default five minutes, counts from then on.
Every measurement takes its servers from this module: snapcap's backends, and the peers with what each needs.
"""

import argparse
import contextlib
import importlib.util
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from snapcap.benchmarks.harness.arguments import add_serve, count, seconds
from snapcap.benchmarks.harness.load import HttpLoad
from snapcap.benchmarks.harness.processes import tree_memory
from snapcap.benchmarks.harness.report import Column, Report, Samples, ratio
from snapcap.benchmarks.harness.server import SNAPCAP_API, Endpoint, Server, ask
from snapcap.benchmarks.harness.workload import (
    FIRST_IMAGE,
    UNPREPARED,
    Workload,
    build_store,
    fresh_caches,
    open_workload,
    run_module,
    scratch,
    serve_command,
)
from snapcap.models.errors import headline
from snapcap.warmup.machine.capacity import available_cpus

ARCHITECTURE, DECODER = "VisionEncoderDecoderModel", "gpt2"
PLAIN = Endpoint("/caption", None)


@dataclass(frozen=True)
class Peer:
    """A server that is not snapcap.

    precision: of the export to ONNX that the peer serves: float32, or int8, which is ONNX Runtime's dynamic
        quantisation. The onnxruntime package runs on a CPU only. Empty: the peer serves the checkpoint itself.
    """

    title: str
    module: str
    needs: tuple[str, ...]
    api: Endpoint = PLAIN
    options: tuple[str, ...] = ()
    precision: str = ""

    def unavailable(self, workload: Workload, device: str) -> str:
        """Returns why the peer cannot be measured here, or an empty text if it can."""
        config = json.loads((workload.folder / "config.json").read_text())
        kind = (config["architectures"], config.get("decoder", {}).get("model_type"))
        if self.precision and device != "cpu":
            return "measured on a CPU alone: onnxruntime has no other device"
        if self.precision and kind != ([ARCHITECTURE], DECODER):
            return f"only a {ARCHITECTURE} with {DECODER} is exported"
        return f"not installed: {', '.join(self.missing)}" if self.missing else ""

    def prepare(self, workload: Workload, work: Path) -> None:
        """Exports the model to a folder of this run, if the peer serves an export."""
        output = self.model(workload, work)
        if not output.is_dir():
            export = (str(workload.folder), str(output), self.precision)
            run_module("snapcap.benchmarks.peers.onnx_export", *export)

    def model(self, workload: Workload, work: Path) -> Path:
        """Returns the folder that the peer serves."""
        return work / "onnx" / self.precision if self.precision else workload.folder

    def command(self, workload: Workload, device: str, work: Path) -> tuple[str, ...]:
        model = ("--model", str(self.model(workload, work)), "--device", device)
        return (sys.executable, "-m", self.module, *model, *self.options)

    @property
    def missing(self) -> list[str]:
        """The packages that the peer needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


_TRANSFORMERS = Peer(
    "FastAPI + transformers generate, unbatched",
    "snapcap.benchmarks.peers.transformers_server",
    ("transformers", "fastapi", "uvicorn"),
)
_ONNX_RUNTIME = Peer(
    "FastAPI + ONNX Runtime, batched",
    "snapcap.benchmarks.peers.onnx_server",
    ("onnxruntime", "onnxscript", "transformers", "fastapi", "uvicorn"),
    options=("--batch", "8"),
    precision="float32",
)
PEERS = {
    "transformers-eager": _TRANSFORMERS,
    "transformers-batched": replace(
        _TRANSFORMERS, title="FastAPI + transformers generate, batched", options=("--batch", "16")
    ),
    "litserve": Peer(
        "LitServe + transformers generate, batched",
        "snapcap.benchmarks.peers.litserve_server",
        ("transformers", "litserve"),
        Endpoint("/caption", "/health", takes_json=True),
        ("--batch", "16"),
    ),
    "onnxruntime": _ONNX_RUNTIME,
    "onnxruntime-int8": replace(
        _ONNX_RUNTIME,
        title="FastAPI + ONNX Runtime int8, batched",
        options=("--batch", "8", "--threads", str(available_cpus())),
        precision="int8",
    ),
}
BACKENDS = {"aot": "snapcap, aot", "jit": "snapcap, jit", "eager": "snapcap, eager"}
# Cases that start without an artifact set or an export.
BARE = ("jit", "eager", "cold", "floor", "import-torch")
DEFAULT = ("aot", "transformers-eager", "transformers-batched", "litserve", "onnxruntime", "eager")
TIME_LIMIT_S = 300.0
STEADY_CAPTIONS = 20
MAKING_READY_S = 60.0
STEADY_LIMIT_S = 5.0
_TIME_OVER = "not run in full: the time limit"
Result = TypeVar("Result")
TITLES = {**BACKENDS, **{name: peer.title for name, peer in PEERS.items()}}


@dataclass
class Start:
    """The measurements of a start.

    values: seconds from the spawn to /livez, READY and the first caption (``total``; for a program that makes no
        caption, its end), and the time of a lone caption once the server is warm: the median of several.
    startup: what ``/startup`` of this server says after its first caption. Empty for other programs.
    """

    values: dict[str, float]
    startup: Mapping[str, Any] = field(default_factory=dict)


class UnavailableError(RuntimeError):
    """A server that cannot be measured on this machine. The message is one line that says why."""


@dataclass(kw_only=True)
class Turns:
    """A measurement whose cases take turns.

    end: the moment at which the time is over, on `time.monotonic`.
    problems: the reason for each case that was not measured.
    """

    end: float
    problems: dict[str, str] = field(default_factory=dict)

    def rounds(self, names: Iterable[str], count: int, measure: Callable[[str], Result]) -> dict[str, list[Result]]:
        """Measures every case once, and then all again, so that disturbances of the machine affect all alike.

        No measurement begins that would end after the time limit. A case that fails is left out and recorded.
        """
        console, found = Console(stderr=True, highlight=False), dict[str, list[Result]]()
        took: dict[str, float] = {}
        for turn in range(count):
            for name in [name for name in names if name not in self.problems]:
                # An interruption between two measurements is recorded like one inside.
                with self.attempt(name):
                    began = time.monotonic()
                    if began + took.get(name, 0.0) > self.end:
                        self.problems[name] = _TIME_OVER
                        continue
                    with self.attempt(name), console.status(f"{name}, round {turn + 1} of {count}"):
                        result = measure(name)
                        found.setdefault(name, []).append(result)
                    took[name] = time.monotonic() - began
                    console.print(f"{name}: {self.problems.get(name, f'{took[name]:.1f} s')}")
        for name in found.keys() & self.problems.keys():
            if self.problems[name] == _TIME_OVER:
                del self.problems[name]  # the table has its number of rounds
        return found

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Records the error of a case that fails inside, so that the others go on."""
        try:
            yield
        except UnavailableError as error:
            self.problems[name] = str(error)
        except KeyboardInterrupt:
            self.end = 0.0
            self.problems[name] = "not run in full: interrupted"
        except Exception as error:
            self.problems[name] = f"failed: {headline(error)[:300]}"
            print(f"{name}: {error}", file=sys.stderr)


@dataclass
class Contenders(Turns):
    """A model on a device, and everything to run its contenders.

    sets: the cache folder with the artifact store.
    work: files of this run.
    serve: further options of `snapcap serve`.
    """

    workload: Workload
    device: str
    sets: Path
    work: Path
    serve: tuple[str, ...]

    def options(self, backend: str) -> tuple[str, ...]:
        """Returns the options of `snapcap serve` for a backend."""
        strict = UNPREPARED if backend == "eager" else ("--strict",)
        cache = ("--cache-dir", str(self.sets), "--log-level", "warning")
        return (*self.model_options, *cache, "--backend", backend, *strict)

    @property
    def model_options(self) -> tuple[str, ...]:
        """The options of `snapcap` that every backend has."""
        return ("--model", str(self.workload.folder), "--device", self.device, *self.serve)

    def command(self, name: str) -> tuple[tuple[str, ...], Endpoint]:
        """Returns the command that starts a contender, and its paths."""
        peer = PEERS.get(name)
        if peer is None:
            return serve_command(*self.options(name)), SNAPCAP_API
        return peer.command(self.workload, self.device, self.work), peer.api

    def prepare(self, name: str) -> None:
        """Makes the files that a start needs, an artifact set or an export, unless they exist.

        Raises:
            UnavailableError: the contender cannot be measured here.
        """
        peer = PEERS.get(name)
        if peer is None:
            build_store(self.sets, *self.model_options)
            return
        reason = peer.unavailable(self.workload, self.device)
        if reason:
            raise UnavailableError(reason)
        peer.prepare(self.workload, self.work)

    def first_captions(self, server: Server) -> Start:
        """Waits until a server is ready, and asks for a first caption, then for more until it is warm."""
        image = (self.workload.images / FIRST_IMAGE).read_bytes()
        start = Start({})
        connection = server.connect()
        is_snapcap = server.api is SNAPCAP_API
        if is_snapcap:
            ask(connection, "/livez")
            start.values["live"] = server.seconds()
        server.wait_ready(connection)
        ready = start.values["ready"] = server.seconds()
        reply = server.caption(connection, image)
        total = start.values["total"] = server.seconds()
        self.workload.check(reply.json())
        if is_snapcap:
            start.startup = ask(connection, "/startup").json()
            # Buckets that are made ready after READY take time of the device meanwhile.
            end = time.monotonic() + MAKING_READY_S
            while time.monotonic() < end and b'"pending"' in ask(connection, "/startup").body:
                time.sleep(0.05)
        lone: list[float] = []
        while len(lone) < 3 or (len(lone) < STEADY_CAPTIONS and sum(lone) < STEADY_LIMIT_S):
            began = time.monotonic()
            server.caption(connection, image)
            lone.append(time.monotonic() - began)
        connection.close()
        steady = statistics.median(lone)
        start.values |= {"first_to_steady": (total - ready) / steady, "steady_ms": steady * 1000}
        return start


@contextlib.contextmanager
def open_contenders(options: argparse.Namespace, device: str) -> Iterator[Contenders]:
    """Yields the contenders of the options, with the artifact set built and the peers prepared."""
    end = time.monotonic() + options.time_limit
    with scratch(options.cache) as cache, scratch() as work:
        workload = open_workload(options.model, cache)
        serve = tuple(shlex.split(options.serve))
        contenders = Contenders(workload, device, cache / "sets" / workload.name, work, serve, end=end)
        for name in [name for name in options.cases if name not in BARE]:
            with contenders.attempt(name):
                contenders.prepare(name)
        yield contenders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serve(parser)
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
    with scratch() as folder, closing(Server(*contenders.command(name), fresh_caches(folder))) as server:
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
    with open_contenders(options, device) as contenders:
        # An interruption while something was built has ended the time.
        contenders.end = contenders.end and time.monotonic() + options.time_limit
        load = HttpLoad(contenders.workload.images, options.clients, options.seconds)
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
