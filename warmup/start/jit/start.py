"""Opens the compiler in a server that starts on the `jit` backend, and closes it once every bucket has run.

    import torch ─ import compiler ─ … ─ restore ─ warm: trace, look up or compile ─ no more compiling ─ publish

Where every lookup hits, nothing is compiled and nothing is published. The cache folder ends with the start.
"""

import contextlib
import importlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

from snapcap.warmup.build.environment import skip_denied_locks, skip_vector_tests
from snapcap.warmup.build.release import publish_jit, report
from snapcap.warmup.build.remote_cache import remote_cache_environment
from snapcap.warmup.errors import BuildError, StartError
from snapcap.warmup.machine.cxx import require_compiler
from snapcap.warmup.machine.installation import resolve_device
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.artifacts import Artifacts
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.compile_events import cache_counts
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.backends.jit import JitBackend
from snapcap.warmup.start.jit.compile_cache import CompileCache, RestoreError
from snapcap.warmup.store.publish import Published
from snapcap.warmup.store.store import StoreError
from snapcap.warmup.store.worker import publish_in_worker

_logger = logging.getLogger("snapcap.jit")


@contextlib.contextmanager
def open_compiler(options: StartOptions, timeline: Timeline, status: StartupStatus) -> Iterator["Jit | None"]:
    """The compiler, imported, with a cache of its own until the block ends; None where there is none.

    Raises:
        StartError: there is none, and the start is strict; or the remote cache cannot be used as configured.
    """
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


class Jit:
    """Compiles until ``settle``. Device thread only."""

    def __init__(self, options: StartOptions, status: StartupStatus, cache: CompileCache) -> None:
        self._options = options
        self._status = status
        self._cache = cache
        self._artifacts: Artifacts | None = None
        self._restored = False
        self._fallbacks: Counter[tuple[str, int]] = Counter()

    def backend(self, plan: Plan, artifacts: Artifacts) -> JitBackend:
        """Returns the backend that compiles the regions. On a hit its compile cache is filled from the artifacts
        first."""
        self._artifacts = artifacts
        if artifacts.hit:
            try:
                count = self._cache.restore(artifacts)
            except RestoreError as error:
                fetched = replace(artifacts.fetched, result="corrupt", reason=str(error), entries={})
                self._artifacts = replace(artifacts, fetched=fetched)
                self._status.fetched(self._artifacts)
                _logger.error("artifacts not restored", extra={"fields": {"error": str(error)}})
            else:
                self._restored = True
                _logger.info("artifacts restored", extra={"fields": {"graphs": count, "key": artifacts.key[:12]}})
        return JitBackend(plan, self._fell_back)

    def settle(self) -> None:
        """Every bucket has run: from now on a call that would have to be compiled runs eager, and is counted."""
        import torch  # noqa: PLC0415
        from torch._inductor.async_compile import shutdown_compile_workers  # noqa: PLC0415

        torch.compiler.set_stance("eager_on_recompile")
        shutdown_compile_workers()
        _logger.info("compiled", extra={"fields": cache_counts()._asdict()})

    def publish(self) -> "Future[list[Published]]":
        """Publish what the next start needs, if this one has missed anything: to the local folder now, and to S3,
        where that may be written, on a thread. The result has what came of each, and is empty without a miss."""
        outcome: Future[list[Published]] = Future()
        artifacts = self._artifacts
        missed = cache_counts().misses > 0 or not self._restored
        if artifacts is None or not missed:
            outcome.set_result([])
            return outcome
        replacing = artifacts.hit or artifacts.fetched.unusable
        local = self._publish_locally(artifacts)
        if local is None or not local.done or not self._options.store.publishes_to_remote:
            outcome.set_result([local] if local else [])
            return outcome

        def publish() -> None:
            try:
                remote = publish_in_worker(artifacts.key, self._options, replacing)
                report(remote, self._status)
            except Exception as error:  # or a build would wait for it for ever
                outcome.set_exception(error)
            else:
                outcome.set_result([local, remote])

        threading.Thread(target=publish, name="publish", daemon=True).start()
        return outcome

    def _publish_locally(self, artifacts: Artifacts) -> Published | None:
        try:
            files = self._cache.save()
            if not files:
                return None
            local = publish_jit(files, artifacts.factors, self._options, artifacts.fetched)
        except (StartError, StoreError, OSError) as error:
            local = Published("error", str(error))
        report(local, self._status)
        return local

    def _fell_back(self, region: str, bucket: int) -> None:
        self._status.fell_back(region, bucket)
        self._fallbacks[region, bucket] += 1
        if self._fallbacks[region, bucket] == 1:
            _logger.error(
                "no compiled graph fits; the region runs eager",
                extra={"fields": {"region": region, "bucket": bucket}},
            )
