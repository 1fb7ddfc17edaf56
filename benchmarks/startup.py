"""Measures starts, from exec to the first caption, of this server beside the field's ways to start.

Every run is a fresh process with fresh compiler caches and a warm page cache.
The cases take turns. Artifact sets are built first if a case needs one. A wrong caption is an error, not a result.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapcap.benchmarks.contenders import BACKENDS, PEERS, Contenders, Start, UnavailableError, open_contenders
from snapcap.benchmarks.harness.arguments import add_serve, count
from snapcap.benchmarks.harness.processes import descendants, own_parts, peak_host_bytes
from snapcap.benchmarks.harness.report import Column, Report, Samples, ratio
from snapcap.benchmarks.harness.server import (
    CREDENTIALS,
    SNAPCAP_API,
    START_LIMIT_S,
    Endpoint,
    Server,
    run_measured,
    s3_artifacts,
)
from snapcap.benchmarks.harness.workload import fresh_caches, scratch, serve_command

FLOOR, IMPORT_TORCH = "floor", "import-torch"
PEER = "transformers-eager"
PUBLISHED = "aot-s3-weights"
COLD = "cold"
TITLES = {
    FLOOR: "floor: import torch, device, weights",
    IMPORT_TORCH: "python -c 'import torch'",
    "eager": "snapcap, eager",
    "aot": "snapcap, aot, folder store",
    PUBLISHED: "snapcap, aot, S3 with weights, nothing cached",
    COLD: "snapcap, empty store",
    **{name: peer.title for name, peer in PEERS.items()},
}
DEFAULT = (FLOOR, "aot", "eager", COLD, PEER, "onnxruntime")


def require_backend(startup: Mapping[str, Any], backend: str, *, later: bool = False) -> None:
    """Checks that a start serves ``backend`` in every bucket. With ``later``, buckets may be warmed after READY, as
    buckets of decode steps alone always are.

    Raises:
        RuntimeError: it serves something else.
    """
    expected = {"loaded", "warm", "eager", "captured"} | ({"pending"} if later else set())
    encodes = {bucket["size"] for bucket in startup["buckets"] if bucket["component"] == "encoder"}
    backends = {bucket["backend"] for bucket in startup["buckets"]}
    states = {bucket["state"] for bucket in startup["buckets"] if bucket["size"] in encodes}
    if startup["tier"] != backend or backends != {backend} or not states <= expected:
        raise RuntimeError(f"expected {backend} in every bucket: {startup['buckets']}")


@dataclass
class Bench:
    """The state that all cases share. ``stack`` closes the resources that cases have opened."""

    contenders: Contenders
    stack: ExitStack
    _remote: tuple[str, ...] = ()

    def start(self, case: str) -> Start:
        """Starts one case in a fresh process with fresh caches.

        Raises:
            UnavailableError: the case cannot be run here.
            RuntimeError: it failed, compiled after READY, or served something else than the case says.
        """
        with scratch() as folder:
            extra, contenders = fresh_caches(folder), self.contenders
            if case in (FLOOR, IMPORT_TORCH):
                command = [sys.executable, "-m", "snapcap.benchmarks.harness.marks", contenders.device]
                command += [str(contenders.workload.folder)] if case == FLOOR else []
                marks, found = run_measured(command, START_LIMIT_S, extra)
                return Start({"total": marks[-1][1], **found})
            if case == PUBLISHED:
                return self._from_s3(folder / "cache", extra)
            if case == COLD:
                options = (*contenders.model_options, "--cache-dir", str(folder / "cache"))
                start = self._serve(serve_command(*options), SNAPCAP_API, extra)
                require_backend(start.startup, "eager", later=True)
                return start
            start = self._serve(*contenders.command(case), extra)
            if case in BACKENDS:
                require_backend(start.startup, case)
            return start

    def _serve(self, command: Sequence[str], api: Endpoint, extra: Mapping[str, str]) -> Start:
        """Starts a server, asks for captions, and ends the server."""
        is_snapcap = api is SNAPCAP_API
        with closing(Server(command, api, extra)) as server:
            try:
                start = self.contenders.first_captions(server)
            except OSError as error:
                server.check()  # raises with the server's exit, if it has ended
                raise RuntimeError(f"{error}: {server.last_line()}") from error
            start.values |= server.compiles()
            if start.values.get("compiles_serving"):
                raise RuntimeError(f"it compiled {start.values['compiles_serving']:.0f} graphs after READY")
            # The workers of a peer are parts of it. The compilers of a build are no parts of this server.
            parts = own_parts(server.pid) if is_snapcap else descendants(server.pid)
            peaks = [peak_host_bytes(pid) for pid in (server.pid, *parts)]
            if peaks[0] is not None:
                start.values["peak_host_mib"] = sum(peak for peak in peaks if peak is not None) / (1 << 20)
            return start

    def _from_s3(self, empty: Path, extra: Mapping[str, str]) -> Start:
        """Starts from packages, checkpoint and weights in S3. This machine does not have them."""
        contenders = self.contenders
        if importlib.util.find_spec("moto") is None:
            raise UnavailableError("not installed: moto, which stands in for S3")
        if not self._remote:
            given = (contenders.sets, contenders.work, contenders.model_options[2:], contenders.workload.folder)
            _, self._remote = self.stack.enter_context(s3_artifacts(*given))
        # The remote options name the model, which may be named once. Other later options override earlier ones.
        options = (*contenders.options("aot")[2:], "--cache-dir", str(empty), *self._remote)
        start = self._serve(serve_command(*options), SNAPCAP_API, {**extra, **CREDENTIALS})
        require_backend(start.startup, "aot")
        fetched = start.startup["weights"] or {}
        if fetched.get("result") != "hit" or not fetched["bytes_fetched"]:
            raise RuntimeError(f"the weights did not come from S3: {fetched}")
        start.values["weights_mib"] = fetched["bytes_fetched"] / (1 << 20)
        return start


def _totals(report: Report, samples: Mapping[str, Samples]) -> None:
    floor, peer = (samples.get(name, Samples()).median("total") for name in (FLOOR, PEER))
    columns: dict[str, Column] = {
        "n": lambda case: str(len(case.values["total"])),
        "/livez s": "live .2f",
        "READY s": "ready .2f",
        "caption s": "total .2f",
        "READY /floor": lambda case: ratio(case.median("ready"), floor),
        "caption /floor": lambda case: ratio(case.median("total"), floor),
        "caption /peer": lambda case: ratio(case.median("total"), peer),
        "steady ms": "steady_ms .1f",
        "first /steady": "first_to_steady .2f",
        "host MiB": "peak_host_mib .0f",
    }
    note = (
        "Medians of n alternating runs, each a fresh process with fresh caches, seconds since its spawn. caption: "
        "the first caption, for the floor and `import torch` their end. /peer: to the first caption of FastAPI + "
        "transformers, unbatched. steady: a lone caption when warm; first: the one asked for at READY. host: "
        "VmHWM, the sum over a server's processes, which counts what they share more than once."
    )
    report.add_cases("Cold start", {TITLES[name]: case for name, case in samples.items()}, columns, note)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serve(parser)
    text = "number of starts of each case (default: %(default)s)"
    parser.add_argument("--runs", type=count, default=5, metavar="N", help=text)


def run(options: argparse.Namespace, device: str) -> int:
    """Runs the measurement. The exit status is 0 if every case that can run here gave results."""
    report = Report()
    with open_contenders(options, device) as contenders, ExitStack() as stack:
        bench = Bench(contenders, stack)
        # Brings files into the page cache: the first import of a package reads the disk.
        contenders.rounds([name for name in options.cases if name in (FLOOR, *PEERS)], 1, bench.start)
        starts = contenders.rounds(options.cases, options.runs, bench.start)
    samples = {name: Samples.of(start.values for start in found) for name, found in starts.items()}
    _totals(report, samples)
    return report.end(options, device, contenders.problems, TITLES, samples)
