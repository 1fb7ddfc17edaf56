"""Starts the contenders of `snapcap bench latency` and `throughput`: snapcap's backends, and the peers."""

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.arguments import add_cases, add_serve, count
from snapcap.benchmarks.harness.marks import read_result
from snapcap.benchmarks.harness.measurements import percentiles_ms
from snapcap.benchmarks.harness.processes import tree_cpu_seconds
from snapcap.benchmarks.harness.server import SNAPCAP_API, Connection, Server, run_measured, serving
from snapcap.benchmarks.harness.workload import (
    ROOT,
    UNPREPARED,
    Workload,
    build_store,
    environment,
    open_workload,
    scratch,
    serve_command,
)
from snapcap.benchmarks.peers.commands import PEERS
from snapcap.benchmarks.report.tables import Report
from snapcap.benchmarks.startup.start import SERVING_COMPILES
from snapcap.warmup.machine.capacity import available_cpus

COMPONENTS = ("encoder", "decoder")
BACKENDS = {"aot": "snapcap, aot", "jit": "snapcap, jit", "eager": "snapcap, eager"}
TITLES = {**BACKENDS, **{name: peer.title for name, peer in PEERS.items()}}
ENGINE_LIMIT_S = 600.0
# Modules that measure a peer's engine without a server: `generate` in a process of its own.
_TRANSFORMERS = "snapcap.benchmarks.peers.transformers_model"
GENERATE = {
    "transformers-eager": (_TRANSFORMERS,),
    "transformers-compile": (_TRANSFORMERS, "--compile"),
    "onnxruntime": ("snapcap.benchmarks.peers.onnx_captioner",),
}


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
        command = [sys.executable, "-m", "snapcap.benchmarks.load.clients", "--port", str(server.port)]
        command += ["--path", server.api.caption, "--images", str(self.images), "--clients", str(share)]
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


class TimeOverError(RuntimeError):
    """The time limit is over, so the next measurement is left out."""


@dataclass
class Contenders:
    """A model on a device, and everything to run its contenders.

    sets: the cache folder with the artifact store.
    images: folder of JPEGs.
    serve: further options of `snapcap serve`.
    end: the moment at which the time is over, on `time.monotonic`.
    problems: the reason for each contender that was not measured.
    """

    workload: Workload
    device: str
    sets: Path
    images: Path
    serve: tuple[str, ...]
    end: float
    problems: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[Server]:
        """Yields a server that is ready to caption.

        Raises:
            TimeOverError: there is no time for it.
        """
        self._check_time()
        peer = PEERS.get(name)
        if peer is not None:
            command, api = peer.command(self.workload, self.device, self.sets), peer.api
        else:
            model = ("--model", str(self.workload.folder), "--device", self.device)
            strict = UNPREPARED if name == "eager" else ("--strict",)
            cache = ("--cache-dir", str(self.sets), "--log-level", "warning")
            command = serve_command(*model, *cache, "--backend", name, *strict, *self.serve)
            api = SNAPCAP_API
        with serving(command, api) as server:
            connection = server.connect()
            server.wait_ready(connection)
            connection.close()
            yield server

    def first_caption(self, server: Server) -> Connection:
        """Requests a caption and checks it. Returns the open connection."""
        connection = server.connect()
        self.workload.check(server.caption(connection, self.workload.first_image[0]).json())
        return connection

    def engine(self, name: str, concurrency: list[int], seconds: float) -> dict[str, Any]:
        """Returns the results of `benchmarks.load.engine`, or of a peer's `generate`, in a process of its own.

        Empty for a contender without such a measurement.

        Raises:
            TimeOverError: there is no time for it.
        """
        self._check_time()
        model = PEERS[name].model(self.workload, self.sets) if name in PEERS else self.workload.folder
        common = ["--model", str(model), "--images", str(self.images), "--device", self.device]
        common += ["--seconds", str(seconds)]
        sizes = ",".join(map(str, concurrency))
        if name in BACKENDS:
            further = [option for option in self.serve if option.startswith(("--buckets=", "--threads="))]
            command = ["snapcap.benchmarks.load.engine", "--backend", name, "--cache", str(self.sets)]
            return self._measured([*command, "--concurrency", sizes, *common, *further])
        if name in GENERATE:
            return self._measured([*GENERATE[name], "--batches", sizes, *common])
        return {}

    def _check_time(self) -> None:
        if time.monotonic() > self.end:
            raise TimeOverError

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Records the error of a contender that fails inside, so that the others go on."""
        try:
            yield
        except TimeOverError:
            self.problems.setdefault(name, "not measured in full: the time limit")
        except KeyboardInterrupt:
            self.end = 0.0
            self.problems[name] = "not measured in full: interrupted"
        except Exception as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            self.problems[name] = f"failed: {lines[0][:200]}"
            print(f"{name}: {error}", file=sys.stderr)

    def add_problems(self, report: Report) -> int:
        """Adds the contenders that were not measured, with the reasons. Returns the exit status."""
        return report.add_problems({TITLES[name]: problem for name, problem in self.problems.items()})

    @staticmethod
    def _measured(module: list[str]) -> dict[str, Any]:
        return read_result(run_measured([sys.executable, "-m", *module], ENGINE_LIMIT_S).lines)


def add_arguments(parser: argparse.ArgumentParser, default: tuple[str, ...]) -> None:
    """Adds the options that both measurements share."""
    add_cases(parser, TITLES, default)
    add_serve(parser)
    text = "number of client processes (default: one for four CPUs, at most 8)"
    parser.add_argument("--processes", type=count, default=client_processes(), metavar="N", help=text)
    parser.add_argument("--no-http", action="store_true", help="measure the engine only")
    parser.add_argument("--no-engine", action="store_true", help="measure over HTTP only")


def client_processes() -> int:
    """Returns the number of client processes that keep up with a server on this machine without taking its CPUs."""
    return min(max(available_cpus() // 4, 1), 8)


def open_contenders(stack: ExitStack, options: argparse.Namespace, device: str) -> Contenders:
    """Returns the contenders of the options, with the artifact set built and the peers prepared."""
    end = time.monotonic() + options.time_limit
    cache = stack.enter_context(scratch(options.cache))
    work = stack.enter_context(scratch())
    workload = open_workload(options.model, cache)
    images = workload.write_images(work / "images")
    serve = tuple(shlex.split(options.serve))
    contenders = Contenders(workload, device, cache / "sets" / workload.name, images, serve, end)
    if "aot" in options.cases:
        build_store(contenders.sets, "--model", str(workload.folder), "--device", device, *serve)
    for name in [case for case in options.cases if case in PEERS]:
        reason = PEERS[name].unavailable(workload, device)
        if reason:
            contenders.problems[name] = reason
            continue
        with contenders.attempt(name):
            PEERS[name].prepare(workload, contenders.sets)
    return contenders


def engine_title(name: str) -> str:
    """Returns a contender's title in measurements without HTTP."""
    return BACKENDS.get(name) or name.replace("-", " generate, ")
