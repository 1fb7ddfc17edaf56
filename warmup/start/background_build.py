"""Builds behind a server that started without artifacts: once per fleet, and swapped in while it serves.

lease held by us     build ─▶ each bucket is swapped in as it is ready ─▶ publish
lease held by others wait for their artifacts ─▶ swap; a lease that expires is taken over
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from snapcap.models.errors import UserError
from snapcap.warmup.build.builder import Builder
from snapcap.warmup.build.release import publish_built, report
from snapcap.warmup.build.remote_cache import remote_cache_environment
from snapcap.warmup.build.tasks import Built, Event
from snapcap.warmup.errors import BuildError
from snapcap.warmup.machine.cpus import all_but_one
from snapcap.warmup.machine.cxx import require_compiler
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.plan.memory import PROCESS_BYTES, MemoryPlan, gib
from snapcap.warmup.plan.room import free_here
from snapcap.warmup.progress.status import COMPONENTS, ComponentName, StartupStatus
from snapcap.warmup.runtime.aoti.torch_packages import torch_backend
from snapcap.warmup.runtime.backends.base import Backend
from snapcap.warmup.runtime.compare import CheckError
from snapcap.warmup.runtime.loaded_model import LoadedModel
from snapcap.warmup.start.preparation import find_artifacts
from snapcap.warmup.start.start import StartedModel
from snapcap.warmup.start.swap import swap_bucket
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.lease import Held, Lease, acquire
from snapcap.warmup.store.open import open_store, trust_of
from snapcap.warmup.store.store import ArtifactStore, StoreDeniedError
from snapcap.warmup.store.worker import publish_in_worker

OnDevice = Callable[[Callable[[], None]], "Future[None]"]

LEASE_SECONDS = 60.0
POLL_SECONDS = 5.0
LOWEST_PRIORITY = 19
ENDING_S = 3.0  # seconds for ending; the HTTP process gives this process ten

_logger = logging.getLogger("snapcap.build")


class BackgroundBuild:
    """Builds artifacts beside the server, on a thread that only directs: compilers are child processes of the
    lowest priority."""

    def __init__(
        self,
        loaded: StartedModel,
        options: StartOptions,
        status: StartupStatus,
        on_device: OnDevice,
        poll_seconds: float = POLL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """``on_device`` runs a function on the device thread between two steps.

        ``poll_seconds``: how often to look for what the lease's holder publishes. ``lease_seconds``: how long a
        builder that was killed holds the others up.

        Raises:
            ValueError: the start has not looked for artifacts, so there is no key to build for."""
        if loaded.artifacts is None:
            raise ValueError("nothing to build: this start uses no artifacts")
        self._artifacts = loaded.artifacts
        if not isinstance(loaded.model, LoadedModel):
            raise TypeError("nothing to build: this start runs compiled packages alone")
        self._loaded = loaded
        self._model = loaded.model
        self._options = options
        self._status = status
        self._on_device = on_device
        self._poll_seconds = poll_seconds
        self._lease_seconds = lease_seconds
        self._stopped = threading.Event()
        self._builder: Builder | None = None
        self._lock = threading.Lock()
        self._swapped: set[tuple[ComponentName, int]] = set()
        self._thread = threading.Thread(target=self._run, name="background-build", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, wait_s: float = ENDING_S) -> None:
        """End the build's processes; what is compiled stays for the next start. Waits a moment for its lease to be
        given back: else the next builder would have to wait until it expires."""
        self._stopped.set()
        if self._builder is not None:
            self._builder.stop()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            self._make()
        except (UserError, OSError) as error:
            self._report(state="failed", error=str(error))
            _logger.error("build failed", extra={"fields": {"error": str(error), "serving": "eager"}})
        except Exception as error:
            self._report(state="failed", error=f"{type(error).__name__}: {error}")
            _logger.exception("build failed unexpectedly; eager goes on serving")

    def _make(self) -> None:
        options, key = self._options, self._artifacts.key
        publishing = options.store.publishes_to_remote
        if options.store.remote is not None and not publishing and options.store.build == "auto":
            self._decline("this server has no key to sign with")
            return
        require_compiler()
        try:
            shared: ArtifactStore = (
                open_store(options.store.remote, options.s3, trust_of(options.store))
                if publishing and options.store.remote is not None
                else FolderStore.open(options.store_folder)
            )
            self._build_or_wait(shared, key, publishing)
        except StoreDeniedError as error:
            if options.store.build == "auto":
                self._decline(str(error))
                return
            self._build_or_wait(FolderStore.open(options.store_folder), key, publishing=False)

    def _decline(self, reason: str) -> None:
        """Publishing is impossible, and a build for this server alone was not asked for."""
        model, store = self._options.model.source, self._options.store.remote
        command = f"snapcap build --model {model} --store {store} --sign-key FILE"
        self._report(state="declined", reason=reason, command=command)
        _logger.warning(
            "not building: %s; run this once where it may publish, or start with --build local: %s",
            reason,
            command,
        )

    def _build_or_wait(self, store: ArtifactStore, key: str, publishing: bool) -> None:
        """Build under the lease, or take what its holder publishes."""
        while not self._stopped.is_set():
            outcome = acquire(store, key, self._lease_seconds)
            if self._take_published():
                if isinstance(outcome, Lease):
                    outcome.release()
                return
            if isinstance(outcome, Held):
                self._report(state="waiting", holder=outcome.owner)
                self._stopped.wait(min(outcome.remaining + 0.1, self._poll_seconds))
                continue
            with outcome.kept():
                self._build(publishing)
            return

    def _take_published(self) -> bool:
        """Swap in what somebody has published since this server looked."""
        loaded = self._loaded
        artifacts = find_artifacts(loaded.checkpoint.config, loaded.plan, self._options, "aot")
        if not artifacts.hit:
            return False
        self._status.fetched(artifacts)
        backend = torch_backend(artifacts.fetched.entries, artifacts.input_specs, self._model)
        for size in loaded.plan.buckets:
            for component in COMPONENTS:
                self._swap(component, size, backend)
        self._report(state="fetched")
        return True

    def _build(self, publishing: bool) -> None:
        loaded, options, key = self._loaded, self._options, self._artifacts.key
        builder = Builder(
            loaded.checkpoint.whole(),  # the builder compares packages with eager, on the weights
            loaded.plan,
            options.store_folder / "builds" / key,
            workers=options.store.build_workers or all_but_one(),
            nice=LOWEST_PRIORITY,
            on_event=lambda event: self._on_event(event, builder),
            environment=remote_cache_environment(options.store.remote_cache, loaded.plan.device),
            timeout=options.store.build_timeout,
            device_memory=self._memory_beside(),
        )
        self._builder = builder
        if self._stopped.is_set():  # before there was a builder to stop
            return
        self._report(state="building", done=0, of=len(builder.tasks))
        _logger.info("building", extra={"fields": {"packages": len(builder.tasks), "key": key[:12]}})
        built = builder.run()
        if self._stopped.is_set():
            return
        if not built.complete:
            entry, reason = next(iter(built.failures.items()))
            raise BuildError(f"{len(built.failures)} packages failed, the first is {entry}: {reason}")
        if built.no_library:
            _logger.warning("no CPU library", extra={"fields": {"reason": built.no_library}})
        self._publish(built, publishing)

    def _memory_beside(self) -> int | None:
        """Bytes of the GPU that a build may take, less what this server may still need.

        Raises:
            BuildError: too little is left for one compiler and one checker.
        """
        loaded = self._loaded
        free = free_here(loaded.plan)
        if free is None:
            return None
        reserved = MemoryPlan(loaded.checkpoint.config, loaded.plan).swap
        if free - reserved < 2 * PROCESS_BYTES:
            raise BuildError(
                f"the GPU has {gib(free)} free, of which this server may need {gib(reserved)}: too little to build "
                f"beside it; run `snapcap build --model {self._options.model.source}` before the server starts"
            )
        return free - reserved

    def _on_event(self, event: Event, builder: Builder) -> None:
        """Called by the builder's threads. Swaps a bucket of a component when its last package is there."""
        if event.kind == "failed":
            fields = {"package": event.task.entry, "error": event.error}
            _logger.error("package failed", extra={"fields": fields})
        if event.kind == "compiled" or (event.kind == "failed" and not event.task.on_demand):
            return
        with self._lock:  # so that the count only grows
            files, specs = builder.made()
            self._report(state="building", done=len(files), of=len(builder.tasks))
        component, size = event.task.component, event.task.size
        if builder.is_settled(component, size):
            self._swap(component, size, torch_backend(files, specs, self._model))

    def _swap(self, component: ComponentName, size: int, backend: Backend) -> None:
        """Switch one bucket on the device thread, once; a mismatch keeps eager and says so."""
        with self._lock:  # two packages may end at once, and both find that none is missing any more
            if (component, size) in self._swapped or self._stopped.is_set():
                return
            self._swapped.add((component, size))
        loaded, status = self._loaded, self._status

        def swap() -> None:
            swap_bucket(loaded.runner, self._model.dtype, component, Bucket(size), backend)

        fields = {"component": component, "bucket": size}
        try:
            self._on_device(swap).result()
        except Exception as error:
            status.swapped("mismatch" if isinstance(error, CheckError) else "failed")
            status.update(component, size, "failed", "eager")
            _logger.error("swap refused; the bucket stays eager", extra={"fields": {**fields, "error": str(error)}})
            return
        status.swapped("swapped")
        captured = loaded.runner.runs_ahead
        status.update(component, size, "captured" if captured else "warm", backend.name)
        _logger.info("bucket swapped in", extra={"fields": fields})

    def _publish(self, built: Built, publishing: bool) -> None:
        """In the local folder, and from there to the remote store by a process that can be ended."""
        artifacts, options = self._artifacts, self._options
        local = publish_built(built, artifacts.factors, options, to_remote=False, found=artifacts.fetched).local
        report(local, self._status)
        if publishing and local.done and not self._stopped.is_set():
            remote = publish_in_worker(artifacts.key, options, artifacts.fetched.unusable)
            report(remote, self._status)
        self._report(state="published")

    def _report(self, **progress: object) -> None:
        self._status.building(**progress)
