"""Names the cases of `snapcap bench startup`, and prepares and starts each."""

import importlib.util
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.arguments import drop_page_cache
from snapcap.benchmarks.harness.measurements import percentiles_ms
from snapcap.benchmarks.harness.moto_store import S3Artifacts, s3_artifacts
from snapcap.benchmarks.harness.server import Server
from snapcap.benchmarks.harness.workload import (
    UNPREPARED,
    Workload,
    build_store,
    fresh_caches,
    scratch,
    serve_command,
)
from snapcap.benchmarks.peers.commands import PEERS
from snapcap.benchmarks.startup.start import Machine, ServerStart, Start, expect, start_script

PAUSE_S = 0.05
BEGIN_LIMIT_S = 20.0
POLL_S = 0.25
# The last bucket is swapped in just before its set is published.
PUBLISH_LIMIT_S = 30.0
BUILD_LIMIT_S = 1800.0
FLOOR = "floor"
IMPORT_TORCH = "import-torch"
TITLES = {
    FLOOR: "floor: import torch, device, weights",
    IMPORT_TORCH: "python -c 'import torch'",
    "eager": "snapcap, eager",
    "aot": "snapcap, aot, folder store",
    "aot-s3": "snapcap, aot, S3, nothing cached",
    "aot-s3-weights": "snapcap, aot, S3 with weights, nothing cached",
    "jit": "snapcap, jit, caches restored",
    "jit-cold": "snapcap, jit, nothing cached",
    "cold": "snapcap, empty store, building",
    **{name: peer.title for name, peer in PEERS.items()},
}
PEER = "transformers-eager"
ONNX = "onnxruntime"
DEFAULT = (FLOOR, "aot", "eager", "cold", PEER, ONNX)
# These cases compile everything, so they run once. Their compiled code is kept for their warm cases.
ONCE = ("jit-cold", "transformers-compile")
# These cases are started once more, to name the processes that they start. Cases of `WARM` must start no compiler.
PUBLISHED = "aot-s3-weights"
S3 = ("aot-s3", PUBLISHED)
WARM = ("aot", *S3, "eager")
WATCHED = (*WARM, "jit")


class LightLoad:
    """A client that requests a caption, waits a little, and requests again. A context manager."""

    def __init__(self, server: Server, workload: Workload) -> None:
        self._server = server
        self._workload = workload
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.latencies: list[float] = []
        self.failures: list[str] = []

    def __enter__(self) -> "LightLoad":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        image, _ = self._workload.first_image
        while not self._over.wait(PAUSE_S):
            began = time.monotonic()
            try:
                connection = self._server.connect()
                reply = self._server.caption(connection, image)
                connection.close()
                self._workload.check(reply.json())
            except (OSError, RuntimeError, ValueError) as error:
                self.failures.append(str(error).splitlines()[0])
            self.latencies.append(time.monotonic() - began)


def until_building(server: Server) -> dict[str, Any]:
    """Waits for the background build to begin, because a start without one is another case.

    Raises:
        RuntimeError: the build has not begun. The message has its state.
    """
    end = time.monotonic() + BEGIN_LIMIT_S
    while True:
        build: dict[str, Any] = server.get("/startup").json()["build"] or {}
        if build.get("state") in ("building", "published"):
            return build
        if build.get("state") in ("failed", "declined") or time.monotonic() > end:
            raise RuntimeError(f"no build in the background: {build}")
        time.sleep(POLL_S)


def until_compiled(server: Server, workload: Workload, limit: float) -> dict[str, Any]:
    """Loads the server lightly until all its buckets are compiled and published.

    Returns ``all_compiled`` in seconds since the spawn (None after ``limit`` seconds), the state of the build, and
    the load's ``requests``, ``failed``, percentiles and ``max_ms``.
    """
    compiled: float | None = None
    with LightLoad(server, workload) as load:
        while True:
            startup = server.get("/startup").json()
            build = startup["build"] or {}
            if compiled is None and {bucket["backend"] for bucket in startup["buckets"]} == {"aot"}:
                compiled = server.seconds()
            published = build.get("state") == "published"
            late = compiled is not None and server.seconds() > compiled + PUBLISH_LIMIT_S
            if (compiled is not None and published) or late or build.get("state") == "failed":
                break
            if server.seconds() > limit:
                break
            time.sleep(POLL_S)
    return {
        "all_compiled": compiled,
        "build": {name: build[name] for name in ("state", "done", "of", "error") if name in build},
        "requests": len(load.latencies),
        "failed": len(load.failures),
        "failures": load.failures[:5],
        **(percentiles_ms(load.latencies) if load.latencies else {}),
        "max_ms": max(load.latencies, default=0.0) * 1000,
        "swaps": {name: value for name, value in server.metrics().items() if "bucket_swaps" in name},
    }


class UnavailableError(RuntimeError):
    """A case that cannot be run on this machine. The message is one line that says why."""


@dataclass
class Bench:
    """The state that all cases share.

    cache: the artifact sets, kept between runs.
    work: files of this run.
    serve: further options of the server.
    stack: closes the resources that cases have opened.
    end: the moment at which the time is over, on `time.monotonic`.
    cold_disk: each start reads its files from the disk.
    """

    workload: Workload
    machine: Machine
    device: str
    cache: Path
    work: Path
    serve: tuple[str, ...]
    stack: ExitStack
    end: float
    cold_disk: bool = False
    _remotes: dict[str, S3Artifacts] = field(default_factory=dict)
    _jit_is_kept: bool = False

    def start(self, case: str, watched: bool = False, whole_build: bool = False) -> Start:
        """Starts one case in a fresh process with fresh caches.

        Args:
            watched: name the processes that the case starts. Watching costs CPU time, so such times must not be
                quoted.
            whole_build: let `cold` go on until everything is compiled, and keep the set for `aot`.

        Raises:
            UnavailableError: the case cannot be run here.
            RuntimeError: it failed, or served something else than the case says.
        """
        with scratch() as folder:
            extra = fresh_caches(folder)
            if self.cold_disk:
                drop_page_cache()
            if case in (FLOOR, IMPORT_TORCH):
                return self._floor(case, extra)
            if case in PEERS:
                return self._peer(case, extra, watched)
            if case == "cold":
                return self._cold(folder / "cache", extra, whole_build)
            return self._snapcap(case, folder / "cache", extra, watched)

    def check(self, case: str) -> None:
        """Checks that a case can be run here.

        Raises:
            UnavailableError: it cannot.
        """
        reason = PEERS[case].unavailable(self.workload, self.device) if case in PEERS else ""
        if reason:
            raise UnavailableError(reason)
        if case in S3 and importlib.util.find_spec("moto") is None:
            raise UnavailableError("not installed: moto, which stands in for S3")

    def prepare(self, case: str) -> None:
        """Makes the files that a case needs before its clock runs, unless they exist.

        The files are its artifact set, its export, or the compilers' caches.
        """
        if case in PEERS:
            PEERS[case].prepare(self.workload, self.cache)
        elif case == "aot" or case in S3:
            build_store(self.cache, *self._model_options)
        elif case == "jit" and not self._jit_is_kept:
            self.start("jit-cold")

    @property
    def _model_options(self) -> tuple[str, ...]:
        return ("--model", str(self.workload.folder), "--device", self.device, *self.serve)

    def _serve(self, cache: Path, *options: str) -> tuple[str, ...]:
        return serve_command(*self._model_options, "--cache-dir", str(cache), *options)

    def _floor(self, case: str, extra: Mapping[str, str]) -> Start:
        if case == IMPORT_TORCH:
            marks = "from snapcap.benchmarks.harness.marks import mark; mark('interpreter')"
            script = f"{marks}; import torch; mark('import_torch')"
            return start_script([sys.executable, "-c", script], self.machine, extra, "import_torch")
        command = [sys.executable, "-m", "snapcap.benchmarks.startup.floor"]
        command += ["--model", str(self.workload.folder), "--device", self.device]
        return start_script(command, self.machine, extra, "load_weights")

    def _peer(self, case: str, extra: Mapping[str, str], watched: bool) -> Start:
        peer = PEERS[case]
        command = peer.command(self.workload, self.device, self.cache)
        return ServerStart(command, self.workload, self.machine, extra, peer.api, watched).run()

    def _snapcap(self, case: str, empty: Path, extra: Mapping[str, str], watched: bool) -> Start:
        if case in S3:
            return self._from_s3(case, empty, extra, watched)
        cold = case == "jit-cold"
        backend = "jit" if cold else case
        strict = UNPREPARED if case == "eager" else ("--strict",)
        command = self._serve(empty if cold else self.cache, "--backend", backend, *strict)
        start = self._server(command, extra, backend, watched=watched).run()
        if cold:
            self._keep(empty)
            self._jit_is_kept = True
        elif case == "jit" and start.facts["startup"]["artifacts"]["result"] != "hit":
            raise RuntimeError(f"the caches were not restored: {start.facts['startup']['artifacts']}")
        return start

    def _server(
        self, command: tuple[str, ...], extra: Mapping[str, str], backend: str, later: bool = False, **further: Any
    ) -> ServerStart:
        check = expect(backend, later)
        return ServerStart(command, self.workload, self.machine, extra, check=check, **further)

    def _keep(self, cache: Path) -> None:
        """Adds the artifact sets of a server's cache folder to those of the warm cases."""
        shutil.copytree(cache / "store", self.cache / "store", dirs_exist_ok=True)

    def _from_s3(self, case: str, empty: Path, extra: Mapping[str, str], watched: bool) -> Start:
        """Starts from S3. With weights, the checkpoint is in S3 too, and this machine does not have it."""
        published = case == PUBLISHED
        if case not in self._remotes:
            options = self._model_options[2:] if published else self._model_options
            given = (options, self.workload.folder) if published else (options,)
            self._remotes[case] = self.stack.enter_context(s3_artifacts(self.cache, self.work, *given))
        remote = self._remotes[case]
        # A later `--model` overrides an earlier one.
        command = self._serve(empty, "--backend", "aot", "--strict", *remote.options)
        start = self._server(command, {**extra, **remote.environment}, "aot", watched=watched).run()
        if published:
            fetched = start.facts["startup"]["weights"]
            if fetched["result"] != "hit" or not fetched["bytes_fetched"]:
                raise RuntimeError(f"the weights did not come from S3: {fetched}")
            start.values |= {"weights_mib": fetched["bytes_fetched"] / (1 << 20), "link_s": remote.link_s}
        return start

    def _cold(self, empty: Path, extra: Mapping[str, str], whole_build: bool) -> Start:
        def finish(server: Server) -> dict[str, Any]:
            until_building(server)
            limit = min(BUILD_LIMIT_S, self.end - server.spawned)
            return {"cold": until_compiled(server, self.workload, limit)} if whole_build else {}

        start = self._server(self._serve(empty), extra, "eager", later=True, afterwards=finish).run()
        compiled = start.facts["cold"]["all_compiled"] if whole_build else None
        if compiled is not None:
            start.values["all_compiled"] = compiled
            self._keep(empty)
        return start
