"""Starts with torch.compile: restores the caches that an earlier start published, and publishes new graphs.

    import torch ─ import compiler ─ … ─ restore ─ warm: trace, look up or compile ─ no more compiling ─ publish

If every lookup hits, nothing is compiled and nothing is published. The cache folder is removed after the start. A
`jit` artifact set has two files:

    jit/cache.bin        torch's own cache artifacts: graphs by key. A pickle, so loading it runs code
    jit/libraries.zip    the shared libraries compiled for the graphs, which torch leaves out; without them a CPU
                         start would call the C++ compiler for every kernel again

Both files are used only after their digests in the manifest were verified.

After the warm-up nothing is compiled: a call that no compiled graph fits runs the region's own function.
"""

import contextlib
import importlib
import io
import logging
import os
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler._cache import CacheInfo

from snapcap.models.dataclass import dataclass
from snapcap.models.layers.fused import compiled_function
from snapcap.models.layers.weights import RegionFunction
from snapcap.models.regions.table import Region
from snapcap.warmup.artifacts.fetch import Artifacts
from snapcap.warmup.artifacts.publish import Published
from snapcap.warmup.artifacts.store import StoreError
from snapcap.warmup.artifacts.worker import publish_in_worker
from snapcap.warmup.build.environment import remote_cache_environment, skip_denied_locks, skip_vector_tests
from snapcap.warmup.build.release import publish_jit, report
from snapcap.warmup.errors import BuildError, StartError
from snapcap.warmup.machine.files import scratch_folder
from snapcap.warmup.machine.installation import require_compiler, resolve_device
from snapcap.warmup.machine.worker import begin
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.plan import Bucket, InductorOption, Plan, inductor_options
from snapcap.warmup.progress.status import StartupStatus, cache_counts
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.torch_model import DTYPES

PAYLOAD = "jit/cache.bin"
LIBRARIES = "jit/libraries.zip"
_logger = logging.getLogger("snapcap.jit")


@contextlib.contextmanager
def open_compiler(options: StartOptions, timeline: Timeline, status: StartupStatus) -> Iterator["Jit | None"]:
    """Imports the compiler and yields it, with a private cache until the block ends; yields None if this machine
    has no compiler. Raises StartError if there is no compiler and the start is strict, or if the remote cache
    cannot be used as configured."""
    try:
        require_compiler()
    except BuildError as error:
        if options.compute.strict:
            raise StartError(f"the jit backend cannot compile: {error}") from error
        status.building(state="failed", error=str(error))
        _logger.error("the jit backend cannot compile", extra={"fields": {"error": str(error), "serving": "eager"}})
        yield None
        return
    device = resolve_device(options.compute.device)
    remote = remote_cache_environment(options.store.remote_cache, device)
    with CompileCache.private(remote) as cache:
        with timeline.phase("import_compiler"):
            skip_denied_locks(cache.folder)
            importlib.import_module("torch._dynamo")
            importlib.import_module("torch._inductor.compile_fx")
            skip_vector_tests(device.partition(":")[0])
        yield Jit(options, status, cache)


@dataclass(eq=False)
class Jit:
    """Compiles until ``settle``. Device thread only."""

    options: StartOptions
    status: StartupStatus
    cache: "CompileCache"
    _artifacts: Artifacts | None = None  # no hit if the cache could not be restored from them

    def backend(self, plan: Plan, artifacts: Artifacts) -> "JitBackend":
        """Returns the backend that compiles the regions. After a hit, first restores the compile cache."""
        self._artifacts = artifacts
        if artifacts.hit:
            try:
                count = self.cache.restore(artifacts)
            except RestoreError as error:
                fetched = replace(artifacts.fetched, result="corrupt", reason=str(error), entries={})
                self._artifacts = replace(artifacts, fetched=fetched)
                self.status.fetched(self._artifacts)
                _logger.error("artifacts not restored", extra={"fields": {"error": str(error)}})
            else:
                _logger.info("artifacts restored", extra={"fields": {"graphs": count, "key": artifacts.key[:12]}})
        return JitBackend(plan, self._fell_back)

    def settle(self) -> None:
        """End compiling after every bucket has run: a later call that no graph fits runs eager, and is counted."""
        from torch._inductor.async_compile import shutdown_compile_workers  # noqa: PLC0415

        torch.compiler.set_stance("eager_on_recompile")
        shutdown_compile_workers()
        _logger.info("compiled", extra={"fields": cache_counts()._asdict()})

    def publish(self) -> "Future[list[Published]]":
        """Publish the compiled graphs if this start compiled any: to the local folder now, and to S3, if it is
        writable, on a thread. The future has the result of each; it is empty if nothing was compiled."""
        artifacts, local = self._artifacts, None
        if artifacts is not None and (cache_counts().misses > 0 or not artifacts.hit):
            local = self._publish_locally(artifacts)
        if artifacts is None or local is None or not local.done or not self.options.store.publishes_to_remote:
            outcome: Future[list[Published]] = Future()
            outcome.set_result([local] if local else [])
            return outcome

        def publish() -> list[Published]:
            replacing = artifacts.hit or artifacts.fetched.unusable
            remote = publish_in_worker(artifacts.key, self.options, replacing)
            report(remote, self.status)
            return [local, remote]

        return begin(publish, "publish")

    def _publish_locally(self, artifacts: Artifacts) -> Published | None:
        try:
            files = self.cache.save()
            if not files:
                return None
            local = publish_jit(files, artifacts.factors, self.options, artifacts.fetched)
        except (StartError, StoreError, OSError) as error:
            local = Published("error", str(error))
        report(local, self.status)
        return local

    def _fell_back(self, region: str, bucket: int) -> None:
        self.status.count("eager_fallbacks", region, str(bucket))
        if self.status.counts("eager_fallbacks")[region, str(bucket)] == 1:
            _logger.error(
                "no compiled graph fits; the region runs eager",
                extra={"fields": {"region": region, "bucket": bucket}},
            )


class RestoreError(RuntimeError):
    """Says in one line why a verified set cannot be restored."""


@dataclass
class CompileCache:
    """Owns the cache folder of one start. The folder is new, so that no earlier start and no other program makes
    this start look warm."""

    folder: Path
    _restored: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    @contextlib.contextmanager
    def private(cls, more: Mapping[str, str]) -> Iterator["CompileCache"]:
        """Makes a new cache folder for Inductor and Triton until the block ends. Enter it before torch compiles.

        Loaded libraries stay loaded. ``more``: other variables of the compiler, set inside the block."""
        with scratch_folder("snapcap-jit-") as folder:
            variables = {
                "TORCHINDUCTOR_CACHE_DIR": str(folder),
                "TRITON_CACHE_DIR": str(folder / "triton"),
                "TORCH_WARM_POOL": "0",  # no compiler processes before there is something to compile
                **more,
            }
            before = {variable: os.environ.get(variable) for variable in variables}
            os.environ.update(variables)
            try:
                yield cls(folder)
            finally:
                for variable, value in before.items():
                    os.environ.pop(variable)
                    if value is not None:
                        os.environ[variable] = value

    def restore(self, artifacts: Artifacts) -> int:
        """Load a set into torch's caches, and return the number of cached graphs and parts of graphs. Raises
        RestoreError if a file is missing or has changed since it was fetched, or torch cannot read it."""
        payload, libraries = (_verified(artifacts, name) for name in (PAYLOAD, LIBRARIES))
        with zipfile.ZipFile(io.BytesIO(libraries)) as archive:
            archive.extractall(self.folder)
        info = torch.compiler.load_cache_artifacts(payload)
        if info is None:
            raise RestoreError(f"torch cannot read {PAYLOAD}; the log has the cause")
        self._restored = _names(info)
        return len(self._restored)

    def save(self) -> dict[str, Path]:
        """Write this start's graphs and libraries to files in the cache folder; return the files by entry name.

        The result is empty if torch has cached nothing new. Every bucket must have run, because restored graphs
        that no bucket has used are left out."""
        saved = torch.compiler.save_cache_artifacts()
        if saved is None or _names(saved[1]) <= self._restored:
            return {}
        files = {name: self.folder / Path(name).name for name in (PAYLOAD, LIBRARIES)}
        files[PAYLOAD].write_bytes(saved[0])
        # Equal contents give equal bytes.
        with zipfile.ZipFile(files[LIBRARIES], "w", zipfile.ZIP_DEFLATED) as archive:
            for library in sorted(self.folder.rglob("*.so")):
                info = zipfile.ZipInfo(str(library.relative_to(self.folder)), date_time=(1980, 1, 1, 0, 0, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, library.read_bytes())
        return files


def _names(info: CacheInfo) -> set[tuple[str, str]]:
    artifacts: Mapping[str, list[str]] = info.artifacts
    return {(kind, key) for kind, keys in artifacts.items() for key in keys}


def _verified(artifacts: Artifacts, name: str) -> bytes:
    """Returns the bytes of an entry, verified again because the file could have changed since it was fetched."""
    file = artifacts.fetched.entries.get(name)
    if file is None:
        raise RestoreError(f"the artifact set has no {name}")
    try:
        return file.read()
    except OSError as error:
        raise RestoreError(f"{name} cannot be read: {error.strerror or error}") from error


# Precompiled headers are off. They speed up a first start on few CPUs, but torch also makes them in a start that
# compiles nothing, which takes longer than the rest of that start, and in a folder that all programs share.
ALONE: Mapping[str, InductorOption] = {"cpp_cache_precompile_headers": False}


@dataclass(frozen=True)
class JitBackend:
    """Compiles a callable at its first call. ``on_fallback`` gets the region and bucket of each call that ran eager
    because no graph fitted."""

    plan: Plan
    on_fallback: Callable[[str, int], None]
    name = "jit"

    def callable(self, region: Region, bucket: Bucket) -> RegionFunction:
        """Returns a function that compiles for the shapes of its first call; a graph break is an error. A region
        that is called on demand stays eager: no request may wait for a compiler."""
        if region.on_demand:
            return region.function
        plan = self.plan
        function = own_code(
            region.function,
            compiled_function(region.function, torch.device(plan.device), DTYPES[plan.dtype]),
            f"{region.name}_b{bucket.size}",
            lambda: self.on_fallback(region.name, bucket.size),
        )
        return compile_static(
            function, {**inductor_options(plan.mode(region.component), plan.device_type), **ALONE}
        )


def compile_static(function: RegionFunction, options: Mapping[str, InductorOption]) -> RegionFunction:
    """Applies `torch.compile` with fullgraph and fixed shapes, without the Inductor options for packages."""
    own: dict[str, Any] = {key: value for key, value in options.items() if not key.startswith("aot_inductor.")}
    compiled: RegionFunction = torch.compile(function, fullgraph=True, dynamic=False, options=own)
    return compiled


def own_code(
    eager: RegionFunction, compiled: RegionFunction, name: str, on_eager: Callable[[], None]
) -> RegionFunction:
    """Returns a function to compile, with a unique name and code object. Traced, it calls ``compiled``; run without
    a graph, it calls ``on_eager`` and then ``eager``.

    Dynamo keeps graphs, and counts recompiles, by code object. Regions that shared one would check each other's
    guards at every call, and exceed `recompile_limit` from the ninth bucket on."""

    def run(*inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a constant for the tracer
            return compiled(*inputs)
        on_eager()
        return eager(*inputs)

    code = run.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, run.__globals__, name, None, run.__closure__)
