"""Builds artifacts in the background of a server that started without them, and swaps the compiled buckets in.

store unreachable         ask again after growing pauses ─▶ swap, or as below
this server has the lease build ─▶ swap each bucket when it is ready ─▶ publish
another has the lease     wait for its artifacts ─▶ swap; take an expired lease over

So a fleet builds once. Processes that share a cache folder, such as the engine processes of several models, build
in turn, because each build takes all CPUs but one.

A bucket is swapped on the device thread between two steps: its packages are opened, and compared with eager on the
serving weights, in separate buffers, so running rows are not affected. Only then do the packages serve.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from snapcap.models.errors import UserError
from snapcap.models.processing.packed import write_grid
from snapcap.models.regions.table import Component
from snapcap.warmup.artifacts.fetch import Artifacts
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.lease import Held, Lease, acquire
from snapcap.warmup.artifacts.remote import open_store, trust_of
from snapcap.warmup.artifacts.store import ArtifactStore, StoreDeniedError, StoreError
from snapcap.warmup.artifacts.worker import find_artifacts, publish_in_worker
from snapcap.warmup.build.builder import Builder, Built, Event
from snapcap.warmup.build.environment import remote_cache_environment
from snapcap.warmup.build.release import publish_built, report
from snapcap.warmup.errors import BuildError
from snapcap.warmup.machine.capacity import all_but_one
from snapcap.warmup.machine.files import locked_alone, make_folder
from snapcap.warmup.machine.installation import require_compiler
from snapcap.warmup.machine.worker import LOWEST_PRIORITY
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.memory import PROCESS_BYTES, MemoryPlan, free_here, gib
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.progress.status import ComponentName, StartupStatus
from snapcap.warmup.runtime.aoti.torch_packages import torch_backend
from snapcap.warmup.runtime.compare import TOLERANCE, CheckError, relative_difference
from snapcap.warmup.runtime.devices import Pixels
from snapcap.warmup.runtime.model import Backend, EagerBackend
from snapcap.warmup.runtime.runner import Callables, Runner, open_callables
from snapcap.warmup.runtime.slot_request import SlotRequest
from snapcap.warmup.runtime.torch_model import LoadedModel
from snapcap.warmup.start.start import StartedModel

OnDevice = Callable[[Callable[[], None]], "Future[None]"]

LEASE_SECONDS = 60.0  # a killed builder blocks other builders this long
POLL_SECONDS = 5.0  # between lookups of artifacts of the lease's holder, and between tries to begin a build in turn
TURN = ".building"  # the file in the cache folder that is locked by the process that builds
LONGEST_PAUSE_S = 300.0  # between two attempts to read a store that could not be read
ENDING_S = 3.0  # seconds for the build to end; the HTTP process waits ten for this process

_logger = logging.getLogger("snapcap.build")


class BackgroundBuild:
    """Builds artifacts while the server runs. A thread controls the build; the compilers are child processes of the
    lowest priority."""

    def __init__(
        self, loaded: StartedModel, options: StartOptions, status: StartupStatus, on_device: OnDevice
    ) -> None:
        """``on_device`` runs a function on the device thread between two steps. Raises ValueError if the start uses
        no artifacts, so that there is no key to build for."""
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
        self._stopped = threading.Event()
        self._builder: Builder | None = None
        self._lock = threading.Lock()
        self._swapped: set[tuple[ComponentName, int]] = set()
        self._thread = threading.Thread(target=self._run, name="background-build", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the build's processes. Finished packages stay for the next start. Waits a moment for the release of
        the lease, because otherwise the next builder would wait until it expires."""
        self._stopped.set()
        if self._builder is not None:
            self._builder.stop()
        if self._thread.is_alive():
            self._thread.join(ENDING_S)

    def _run(self) -> None:
        try:
            if self._store_answers() and self._options.store.build != "off":
                self._make()
        except (UserError, OSError) as error:
            self._status.building(state="failed", error=str(error))
            _logger.error("build failed", extra={"fields": {"error": str(error), "serving": "eager"}})
        except Exception as error:
            self._status.building(state="failed", error=f"{type(error).__name__}: {error}")
            _logger.exception("build failed unexpectedly; eager goes on serving")

    def _store_answers(self) -> bool:
        """Waits for a store that the start could not read. If the store then has artifacts, swaps them in and
        returns False; returns True if they must be built. Does not wait for a build that stays on this machine."""
        store, pause = self._options.store, POLL_SECONDS
        if store.remote is None or store.build == "local":
            return True
        while self._artifacts.fetched.result == "error":
            pause = self._pause(pause, self._artifacts.fetched.reason)
            if self._stopped.is_set():
                return False
            self._artifacts = self._look()
            if self._take(self._artifacts):
                return False
        return True

    def _pause(self, seconds: float, reason: str) -> float:
        """Waits before the store is asked again, and logs why. Returns the seconds of the next such wait."""
        self._status.building(state="looking", reason=reason)
        _logger.warning("the store is asked again", extra={"fields": {"after_s": seconds, "reason": reason}})
        self._stopped.wait(seconds)
        return min(2 * seconds, LONGEST_PAUSE_S)

    def _make(self) -> None:
        options, key = self._options, self._artifacts.key
        publishing = options.store.publishes_to_remote
        if options.store.remote is not None and not publishing and options.store.build == "auto":
            self._decline("this server has no key to sign with")
            return
        require_compiler()
        remote = options.store.remote if publishing else None
        try:
            store = open_store(remote or str(options.store_folder), options.s3, trust_of(options.store))
            self._build_or_wait(store, key, publishing)
        except StoreDeniedError as error:
            if remote is None:  # the store is the folder: nowhere else could artifacts be published
                raise
            if options.store.build == "auto":
                self._decline(str(error))
                return
            self._build_or_wait(FolderStore.open(options.store_folder), key, publishing=False)

    def _decline(self, reason: str) -> None:
        """Logs that this server does not build, because it cannot publish and --build is not local."""
        model, store = self._options.model.source, self._options.store.remote
        command = f"snapcap build --model {model} --store {store} --sign-key FILE"
        self._status.building(state="declined", reason=reason, command=command)
        _logger.warning(
            "not building: %s; run this once where it may publish, or start with --build local: %s", reason, command
        )

    def _build_or_wait(self, store: ArtifactStore, key: str, publishing: bool) -> None:
        """Builds in turn and under the lease, or swaps in the artifacts that the lease's holder publishes. If a
        remote store fails, it is asked again after growing pauses: otherwise one failure among the many requests of
        a wait would leave this server eager for good."""
        folder, pause = self._options.model.cache_dir, POLL_SECONDS
        while not self._stopped.is_set():
            with contextlib.ExitStack() as turn:
                ours: bool | None = None
                with contextlib.suppress(OSError):  # without a writable cache folder, builds take no turns
                    make_folder(folder)
                    ours = turn.enter_context(locked_alone(folder / TURN))
                outcome: Lease | Held | StoreError = Held("another process with this cache folder", POLL_SECONDS)
                if ours is not False:
                    outcome = self._acquire(store, key)
                if self._take(self._look()):
                    if isinstance(outcome, Lease):
                        outcome.release()
                    return
                if isinstance(outcome, Lease):
                    with outcome.kept():
                        self._build(publishing)
                    return
            if isinstance(outcome, StoreError):
                pause = self._pause(pause, str(outcome))
                continue
            pause = POLL_SECONDS
            self._status.building(state="waiting", holder=outcome.owner)
            self._stopped.wait(min(outcome.remaining + 0.1, POLL_SECONDS))

    def _acquire(self, store: ArtifactStore, key: str) -> Lease | Held | StoreError:
        """Returns what ``acquire`` does, or the error of a remote store that may answer later. Raises the errors of
        a folder, and StoreDeniedError."""
        try:
            return acquire(store, key, LEASE_SECONDS)
        except StoreDeniedError:
            raise
        except StoreError as error:
            if not store.is_remote:
                raise
            return error

    def _look(self) -> Artifacts:
        """Returns the result of a new lookup of artifacts."""
        return find_artifacts(self._options, self._artifacts.factors)

    def _take(self, artifacts: Artifacts) -> bool:
        """Swaps in artifacts that were published since this server started. Returns False if there are none."""
        loaded = self._loaded
        if not artifacts.hit:
            return False
        self._status.fetched(artifacts)
        backend = torch_backend(artifacts.fetched.entries, artifacts.input_specs, self._model)
        for bucket in loaded.plan.step_table.buckets:
            for component in loaded.warmer.components(bucket):
                self._swap(component, bucket.size, backend)
        self._status.building(state="fetched")
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
            only_own=not trust_of(options.store).owner_suffices,
        )
        self._builder = builder
        if self._stopped.is_set():  # `stop` came before there was a builder
            return
        self._status.building(state="building", done=0, of=len(builder.tasks))
        _logger.info("building", extra={"fields": {"packages": len(builder.tasks), "key": key[:12]}})
        built = builder.run()
        if self._stopped.is_set():
            return
        if not built.complete:
            entry, reason = next(iter(built.failures.items()))
            raise BuildError(f"{len(built.failures)} packages failed, the first is {entry}: {reason}")
        for entry, why in built.no_libraries.items():
            _logger.warning("a library is missing", extra={"fields": {"entry": entry, "reason": why}})
        self._publish(built, publishing)

    def _memory_beside(self) -> int | None:
        """Returns the bytes of the GPU that a build may take: the free bytes less this server's further need; None
        for a CPU. Raises BuildError if they are too few for one compiler and one checker."""
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
        """Handles an event on a builder's thread. Swaps a component's bucket when its last package is built."""
        if event.kind == "failed":
            fields = {"package": event.task.entry, "error": event.error}
            _logger.error("package failed", extra={"fields": fields})
        if event.kind == "compiled" or (event.kind == "failed" and not event.task.on_demand):
            return
        with self._lock:  # so that the count only grows
            files, specs = builder.made()
            self._status.building(state="building", done=len(files), of=len(builder.tasks))
        component, size = event.task.component, event.task.size
        if builder.is_settled(component, size):
            self._swap(component, size, torch_backend(files, specs, self._model))

    def _swap(self, component: ComponentName, size: int, backend: Backend) -> None:
        """Switches a bucket to compiled code on the device thread, once. A mismatch leaves the bucket eager."""
        if not self._loaded.plan.runs_on_libtorch:
            return  # the next start runs the packages
        with self._lock:  # two threads may notice at the same time that the bucket is complete
            if (component, size) in self._swapped or self._stopped.is_set():
                return
            self._swapped.add((component, size))
        loaded, status = self._loaded, self._status

        def swap() -> None:
            swap_bucket(loaded.runner, component, Bucket(size), backend)

        fields = {"component": component, "bucket": size}
        try:
            self._on_device(swap).result()
        except Exception as error:
            status.swapped("mismatch" if isinstance(error, CheckError) else "failed")
            status.update(component, size, "failed", "eager")
            _logger.error("swap refused; the bucket stays eager", extra={"fields": {**fields, "error": str(error)}})
            return
        status.swapped("swapped")
        captured = loaded.runner.device.runs_ahead
        status.update(component, size, "captured" if captured else "warm", backend.name)
        _logger.info("bucket swapped in", extra={"fields": fields})

    def _publish(self, built: Built, publishing: bool) -> None:
        """Publishes to the local folder, and from there to the remote store, in a process that can be ended."""
        artifacts, options = self._artifacts, self._options
        (local,) = publish_built(built, artifacts.factors, options, to_remote=False, found=artifacts.fetched)
        report(local, self._status)
        last = local
        if publishing and local.done and not self._stopped.is_set():
            last = publish_in_worker(artifacts.key, options, artifacts.fetched.unusable)
            report(last, self._status)
        if last.done:
            self._status.building(state="published")
        else:
            self._status.building(state="failed", error=f"the artifacts were not published: {last.reason}")


CHECKED_STEPS = 3
# Tolerance of a whole component: it adds the rounding of all its layers.
_LAYERS_FACTOR = 4.0


def swap_bucket(runner: Runner[Tensor], component: Component, bucket: Bucket, backend: Backend) -> None:
    """Switch a component's bucket to this backend. Raises PackageError or InputSpecError if the packages cannot be
    opened, and CheckError if the results differ from eager's; the bucket stays unchanged."""
    compiled = open_callables(runner.regions, component, bucket, backend)
    eager = open_callables(runner.regions, component, bucket, EagerBackend())
    check_bucket(runner, component, bucket, compiled, eager)
    runner.bind(component, bucket, compiled)
    if runner.device.runs_ahead:
        runner.capture(component, bucket)


def check_bucket(
    runner: Runner[Tensor], component: Component, bucket: Bucket, compiled: Callables, eager: Callables
) -> None:
    """Run both on the same random inputs, in buffers of their own, and compare results and written caches.
    Raises CheckError if they differ by more than rounding in the dtype."""
    ours, theirs = runner.twin(), runner.twin()
    ours.bind(component, bucket, compiled)
    theirs.bind(component, bucket, eager)
    check = _check_encoder if component == "encoder" else _check_decoder
    check(ours, theirs, bucket)


def _check_encoder(ours: Runner[Tensor], theirs: Runner[Tensor], bucket: Bucket) -> None:
    """Encode random images, and texts if the encode reads them."""
    texts, dtype = _random_texts(ours, bucket), ours.state.key.dtype
    own = ("key", "value") if ours.config.decoder.reads_prompt else ()
    for images in _random_images(ours, bucket):
        actual, expected = ours.encode(bucket, images, 0, texts), theirs.encode(bucket, images, 0, texts)
        _require_close("encoder output", actual, expected, dtype)
        for name in ("cross_key", "cross_value", *own):
            _require_close(name, _rows(ours, name, bucket), _rows(theirs, name, bucket), dtype)


def _check_decoder(ours: Runner[Tensor], theirs: Runner[Tensor], bucket: Bucket) -> None:
    """Run some steps over the same random prompts."""
    config, dtype = ours.config, ours.state.key.dtype
    # Random numbers are drawn on the device: rows wait meanwhile, and a host would take seconds for large caches.
    generator = torch.Generator(ours.state.key.device).manual_seed(bucket.size)
    for name in ("cross_key", "cross_value"):
        drawn = _rows(ours, name, bucket).normal_(generator=generator)
        _rows(theirs, name, bucket).copy_(drawn)
    steps = min(CHECKED_STEPS, ours.state.cache_length - 1)
    numbers = np.random.default_rng(bucket.size)
    prompts = numbers.integers(0, config.decoder.vocab_size, (bucket.size, steps)).tolist()
    texts = [row.read(config.generation.start_id) for row in _random_texts(ours, bucket)]
    for twin in (ours, theirs):
        twin.state.write_texts(range(len(texts)), texts)  # a step may read where each text ends, and the grids
        twin.state.write_grids(range(bucket.size), [(1 + row % 3, 5) for row in range(bucket.size)])
        twin.admit(0, [SlotRequest(prompt) for prompt in prompts])
    for _ in range(steps):
        _require_close("logits", ours.decode_step(bucket), theirs.decode_step(bucket), dtype)
    for name in ("key", "value"):
        _require_close(name, _rows(ours, name, bucket), _rows(theirs, name, bucket), dtype)
    if not torch.equal(ours.state.positions, theirs.state.positions):
        raise CheckError("positions differ")


def _rows(runner: Runner[Tensor], cache: str, bucket: Bucket) -> Tensor:
    """Returns a bucket's rows of a cache, in every layer."""
    rows: Tensor = getattr(runner.state, cache)[:, : bucket.size]
    return rows


def _random_images(runner: Runner[Tensor], bucket: Bucket) -> list[list[Pixels]]:
    """Returns a batch of random images; for packed pictures a batch for each number of tokens, in which the first
    picture fills all tokens and the others fewer."""
    generator, vision = np.random.default_rng(bucket.size), runner.config.vision
    shape = (bucket.size, *vision.image_size, 3)
    batches = [[*generator.integers(0, 256, shape, dtype=np.uint8)] for _ in vision.token_buckets or (0,)]
    for batch, tokens in zip(batches, vision.token_buckets, strict=False):
        for number, picture in enumerate(batch):
            write_grid(picture, 1 + number % 2, tokens // (1 + number))
    return batches


def _random_texts(runner: Runner[Tensor], bucket: Bucket) -> list[SlotRequest]:
    """Returns texts of several lengths for the encode; empty for a model whose encode reads no texts. If the model
    reads texts before an image, half of each instruction is there."""
    decoder = runner.config.decoder
    longest = min(decoder.text_tokens, runner.state.cache_length - 2)
    if longest < 1:
        return []
    generator = np.random.default_rng(bucket.size)
    texts = [
        generator.integers(0, decoder.vocab_size, length).tolist()
        for length in generator.integers(1, longest + 1, bucket.size)
    ]
    if decoder.reads_prompt:
        return [SlotRequest(text, prefilled=len(text), ahead=len(text) // 2) for text in texts]
    return [SlotRequest(text=text) for text in texts]


def _require_close(name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    difference, allowed = relative_difference(actual, expected), TOLERANCE[dtype] * _LAYERS_FACTOR
    if difference > allowed:
        raise CheckError(f"{name} differ by {difference:.1e}, more than {allowed:.0e}")
