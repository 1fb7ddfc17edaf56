"""Loads one server from several client processes, and collects the measurements of clients and server."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.common import ROOT, environment
from snapcap.benchmarks.harness.measurements import percentiles_ms
from snapcap.benchmarks.harness.processes import tree_cpu_seconds
from snapcap.benchmarks.harness.server import Server
from snapcap.benchmarks.startup.start import SERVING_COMPILES

COMPONENTS = ("encoder", "decoder")


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
