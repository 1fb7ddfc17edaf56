"""The cases of `snapcap bench startup`: what is started, in which order it must come, and what it needs."""

import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cold import BUILD_LIMIT_S, until_building, until_compiled
from benchmarks.common import build_store, fresh_caches, scratch, serve_command
from benchmarks.moto_store import S3Artifacts, s3_artifacts
from benchmarks.peers.commands import PEERS
from benchmarks.server import Server
from benchmarks.start import Machine, ServerStart, Start, expect, start_script
from benchmarks.workload import FIRST_IMAGE, Workload
from service.config import ComputeSettings
from service.options import options_of

FLOOR = "floor"
IMPORT_TORCH = "import-torch"
TITLES = {
    FLOOR: "floor: import torch, device, weights",
    IMPORT_TORCH: "python -c 'import torch'",
    "eager": "snapcap, eager",
    "aot": "snapcap, aot, folder store",
    "aot-s3": "snapcap, aot, S3, nothing cached",
    "jit": "snapcap, jit, caches restored",
    "jit-cold": "snapcap, jit, nothing cached",
    "cold": "snapcap, empty store, building",
    "full-compile": "full-model torch.compile",
    "full-compile-restored": "full-model torch.compile, restored",
    "regional-compile": "regional torch.compile",
    "regional-compile-restored": "regional torch.compile, restored",
    **{name: peer.title for name, peer in PEERS.items()},
}
DEFAULT = (FLOOR, "aot", "eager", "cold", "transformers-eager")
# These compile for as long as it takes, so once is enough.
ONCE = {"jit-cold", "full-compile", "regional-compile", "transformers-compile"}
# Nothing may be compiled in these.
WARM = ("aot", "aot-s3", "eager")


class UnavailableError(RuntimeError):
    """A case that cannot be run on this machine; one line that says why."""


@dataclass
class Bench:
    """What all cases share. ``cache`` holds the artifact sets between runs, ``work`` what only this one needs;
    ``serve`` are further options of the server, ``stack`` ends what the cases have opened, and ``end`` is when the
    time is over, on `time.monotonic`."""

    workload: Workload
    machine: Machine
    device: str
    cache: Path
    work: Path
    serve: tuple[str, ...]
    stack: ExitStack
    end: float
    _remote: S3Artifacts | None = None

    def start(self, case: str, watched: bool = False, whole_build: bool = False) -> Start:
        """Start one case in a fresh process with fresh caches.

        Args:
            watched: name the processes it starts; costs CPU time, so the times are not to be quoted.
            whole_build: let `cold` go on until everything is compiled, and keep the set for `aot`.

        Raises:
            UnavailableError: it cannot be run here.
            RuntimeError: it failed, or served something else than the case says.
        """
        with scratch() as folder:
            extra = fresh_caches(folder)
            if case in (FLOOR, IMPORT_TORCH):
                return self._floor(case, extra)
            if case in PEERS:
                return self._peer(case, extra, watched)
            if "compile" in case:
                return self._strategy(case, extra)
            if case == "cold":
                return self._cold(folder / "cache", extra, whole_build)
            return self._snapcap(case, folder / "cache", extra, watched)

    def prepare(self, case: str) -> None:
        """What a case needs before its clock runs: its artifact set.

        Raises:
            UnavailableError: it cannot be run here.
        """
        if case in PEERS and PEERS[case].missing:
            raise UnavailableError(f"not installed: {', '.join(PEERS[case].missing)}")
        if case in ("aot", "aot-s3"):
            build_store(self.cache, *self._model_options)
        elif case.endswith("-restored") and not self._saved(case).is_file():
            self.start(case.removesuffix("-restored"))
        elif case.startswith("jit") and "jit" not in options_of(ComputeSettings)["backend"].choices:
            raise UnavailableError("this snapcap has no jit backend")
        elif case == "jit":
            self._jit(self.cache / "jit", {})

    @property
    def _model_options(self) -> tuple[str, ...]:
        return ("--model", str(self.workload.folder), "--device", self.device, *self.serve)

    def _serve(self, cache: Path, *options: str) -> tuple[str, ...]:
        return serve_command(*self._model_options, "--cache-dir", str(cache), *options)

    def _floor(self, case: str, extra: Mapping[str, str]) -> Start:
        if case == IMPORT_TORCH:
            script = "from benchmarks.marks import mark; mark('interpreter'); import torch; mark('import_torch')"
            return start_script([sys.executable, "-c", script], self.machine, extra, "import_torch")
        command = [sys.executable, "-m", "benchmarks.floor"]
        command += ["--model", str(self.workload.folder), "--device", self.device]
        return start_script(command, self.machine, extra, "load_weights")

    def _peer(self, case: str, extra: Mapping[str, str], watched: bool) -> Start:
        peer = PEERS[case]
        command = peer.command(self.workload, self.device)
        return ServerStart(command, self.workload, self.machine, extra, peer.api, watched).run()

    def _saved(self, case: str) -> Path:
        """Where the compiler caches of a strategy are kept."""
        return self.work / f"{case.removesuffix('-restored')}.cache"

    def _strategy(self, case: str, extra: Mapping[str, str]) -> Start:
        images = self.workload.write_images(self.work / "images")
        restored, kept = case.endswith("-restored"), self._saved(case)
        command = [sys.executable, "-m", "benchmarks.strategies", case.partition("-")[0]]
        command += ["--model", str(self.workload.folder), "--device", self.device]
        command += [
            "--image",
            str(images / FIRST_IMAGE),
            "--restore" if restored else "--save",
            str(kept),
        ]
        return start_script(command, self.machine, extra, "first_caption")

    def _snapcap(self, case: str, empty: Path, extra: Mapping[str, str], watched: bool) -> Start:
        if case == "aot-s3":
            return self._from_s3(empty, extra, watched)
        if case == "jit-cold":
            return self._jit(empty, extra)
        if case == "jit":
            return self._jit(self.cache / "jit", extra)
        command = self._serve(self.cache, "--backend", case, *(("--strict",) if case == "aot" else ()))
        return ServerStart(command, self.workload, self.machine, extra, watched=watched, check=expect(case)).run()

    def _jit(self, cache: Path, extra: Mapping[str, str]) -> Start:
        command = self._serve(cache, "--backend", "jit", "--strict")
        return ServerStart(command, self.workload, self.machine, extra, check=expect("jit")).run()

    def _from_s3(self, empty: Path, extra: Mapping[str, str], watched: bool) -> Start:
        if self._remote is None:
            self._remote = self.stack.enter_context(s3_artifacts(self.cache, self.work, self._model_options))
        command = self._serve(empty, "--backend", "aot", "--strict", *self._remote.options)
        variables = {**extra, **self._remote.environment}
        return ServerStart(
            command, self.workload, self.machine, variables, watched=watched, check=expect("aot")
        ).run()

    def _cold(self, empty: Path, extra: Mapping[str, str], whole_build: bool) -> Start:
        def finish(server: Server) -> dict[str, Any]:
            until_building(server)
            limit = min(BUILD_LIMIT_S, self.end - server.spawned)
            return {"cold": until_compiled(server, self.workload, limit)} if whole_build else {}

        start = ServerStart(
            self._serve(empty), self.workload, self.machine, extra, check=expect("eager"), afterwards=finish
        ).run()
        compiled = start.facts["cold"]["all_compiled"] if whole_build else None
        if compiled is not None:
            start.values["all_compiled"] = compiled
            if not (self.cache / "store").exists():
                shutil.copytree(empty / "store", self.cache / "store")
        return start
