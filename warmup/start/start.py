"""Starts a model, from a bare process to a warm runner, and decides what overlaps what.

    threads         published ─ planned ─┬─ artifacts ────────┐      the steps of `preparation`
                                         └─ prepared weights ─┤
    thread (cuda)   driver and context ───────────────────────┤
    threads         torch's libraries ─ open packages ────────┤
    device thread                                             └ device ─ weights ─ warm ─ self-test ─ ready

A start that finds packages and prepared weights does not import torch's Python module. Every other start imports it
on a thread, which takes longer than all steps of the preparation. ``_bring_up`` is the sequence of both starts; a
`Loader` is the part in which they differ: `native.NativeLoader` and `with_torch.TorchLoader`.

Nothing here imports torch before `import_torch`, so a server that has bound its port answers meanwhile.
"""

import contextlib
import hashlib
import importlib
import logging
import sys
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS
from snapcap.models.memory.memory import B
from snapcap.warmup.artifacts.fetch import Artifacts
from snapcap.warmup.artifacts.key import canonical_json
from snapcap.warmup.artifacts.store import WEIGHTS
from snapcap.warmup.errors import StartError, first_line
from snapcap.warmup.machine.installation import has_torch_module
from snapcap.warmup.machine.torch_libraries import begin_device_context, load_torch_libraries
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Bucket, BucketTable, Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.aoti.packages import CaptureError
from snapcap.warmup.start.preparation import NO_CALLBACKS, STEPS, Callbacks, Preparation
from snapcap.warmup.start.published import begin_fetcher, close_behind, may_be_published
from snapcap.warmup.weights.find import FoundWeights, WeightsResult

if TYPE_CHECKING:
    from snapcap.models.weights.prepared import MappedWeights
    from snapcap.warmup.artifacts.publish import Published
    from snapcap.warmup.runtime.devices import Device
    from snapcap.warmup.runtime.model import Backend, Model
    from snapcap.warmup.runtime.runner import Runner
    from snapcap.warmup.start.jit import Jit
    from snapcap.warmup.start.warmer import Warmer
    from snapcap.warmup.weights.published import ModelFetcher

SWITCH_INTERVAL_S = 0.0001
_logger = logging.getLogger("snapcap.start")


@dataclass(frozen=True)
class StartedModel:
    """Holds a model that is ready to serve.

    backend: the backend that serves.
    cold: the buckets that are not warm yet, the smallest first. They are made ready while the server captions.
    weights: the result of looking for prepared weights.
    rehearses: a request is rehearsed before READY. False where that would only delay READY: a lone request
        computes for longer than a first run may take, or this server has started the model before.
    publication: with the jit backend, the future result of publishing the graphs that it compiled."""

    checkpoint: Checkpoint
    plan: Plan
    model: "Model[Any]"
    runner: "Runner[Any]"
    warmer: "Warmer"
    backend: "Backend"
    artifacts: Artifacts | None
    cold: tuple[Bucket, ...]
    weights: WeightsResult
    rehearses: bool = True
    publication: "Future[list[Published]] | None" = None

    @property
    def warm_table(self) -> BucketTable:
        """The buckets of decode steps that may serve by now."""
        cold = {bucket.size for bucket in self.cold}
        return BucketTable.of(size for size in self.plan.step_table.sizes if size not in cold)

    @property
    def compiled(self) -> bool:
        """True if every bucket came from artifacts."""
        return self.artifacts is not None and self.artifacts.hit


class Loader(AbstractContextManager[object], Protocol[B]):
    """Protocol of the part of a start that depends on whether the process has torch's module. Only the device
    thread calls the methods, in the order in which they stand here, within the context. The context opens what the
    start needs until its self-test is over, such as compilers and threads that open packages."""

    @property
    def jit(self) -> "Jit | None":
        """The compiler of the jit backend."""

    @property
    def eager(self) -> "Backend | None":
        """The backend of a bucket whose compiled code fails. If it is None, such a failure ends the loader's
        start."""

    def open_device(self) -> "Device[B]": ...

    def load_model(self, checkpoint: Checkpoint, mapped: "MappedWeights | None") -> "tuple[Checkpoint, Model[B]]":
        """Loads the weights onto the device, from prepared weights if possible, and makes the buffers. Returns the
        model, and the checkpoint with the files that the weights were read from. Raises WeightsError if the weights
        cannot be read or do not fit the configuration."""

    def open_packages(self, warmer: "Warmer", model: "Model[B]", artifacts: Artifacts | None) -> "Backend":
        """Returns the backend that serves. The warmer has put all buckets of encodes on it if their packages are
        opened here; otherwise other threads open packages while the first ones run."""


class _SmallerPlanError(Exception):
    """Says that the device has no room for the largest buckets. ``plan``: the plan without these buckets."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(f"buckets {plan.step_table.sizes} fit")
        self.plan = plan


def load(
    options: StartOptions,
    timeline: Timeline,
    status: StartupStatus,
    fetcher: "ModelFetcher | None" = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> StartedModel:
    """Runs the start on the calling thread, which becomes the device thread. ``fetcher`` is the fetcher of a
    published model, if it was begun for these options already. Raises CheckpointError, ConfigError or WeightsError
    if the model cannot be served, and StartError if a setting does not fit, or the start is strict and not what was
    asked for."""
    while True:
        try:
            return _load(options, timeline, status, fetcher, callbacks)
        except _SmallerPlanError as error:  # a smaller plan has another key, and so other artifacts
            options, fetcher, callbacks = error.plan.pinned(options), None, NO_CALLBACKS


def _load(
    options: StartOptions,
    timeline: Timeline,
    status: StartupStatus,
    fetcher: "ModelFetcher | None",
    callbacks: Callbacks,
) -> StartedModel:
    with contextlib.ExitStack() as scope:
        # A thread that waits for Python's lock asks for it after this interval, by default 0.005 s. Threads beside
        # the import of torch ask hundreds of times.
        scope.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        pool = scope.enter_context(ThreadPoolExecutor(STEPS + 1, thread_name_prefix="snapcap-fetch"))
        begin_device_context(options.compute.device)
        fetcher = fetcher or begin_fetcher(options)
        reason = torch_is_needed(options)
        importing = None if reason is None else _begin_import(reason, pool, timeline)
        preparation = Preparation(options, timeline, status, pool, fetcher, callbacks)
        close_behind(fetcher, [preparation.weights, preparation.artifacts])
        if importing is None:
            reason = wait_for_parts(preparation)
            if reason is None:
                _require_room(preparation)
                started = _without_torch(preparation)
                if started is not None:
                    return started
                reason = "what there is does not work, as the log says"
            importing = _begin_import(reason, pool, timeline)
        importing.result()
        _require_room(preparation)
        from snapcap.warmup.start.with_torch import TorchLoader  # noqa: PLC0415  imports torch

        loader = TorchLoader(preparation.planned.result().plan, options, timeline, status)
        return _bring_up(loader, preparation)


def _bring_up(loader: Loader[B], preparation: Preparation, *, tested: bool = False) -> StartedModel:
    """Makes a warm model of the results of the preparation, with torch's module or without. `tested`: the model has
    passed its self-test in this server before, with the same packages; the request that it wakes for is the next
    one to run all layers."""
    from snapcap.warmup.runtime.runner import Runner  # noqa: PLC0415  imports numpy, for which no fetch waits
    from snapcap.warmup.start.warmer import LONGEST_RUN_S, Warmer, self_test  # noqa: PLC0415  imports the runner

    options, timeline, status = preparation.options, preparation.timeline, preparation.status
    with loader:
        checkpoint = preparation.checkpoint.result()
        plan, (_, weights) = preparation.planned.result().plan, preparation.weights.result()
        with timeline.phase("device_init"):
            device = loader.open_device()
        with timeline.phase("load_weights"):
            checkpoint, model = loader.load_model(checkpoint, weights.mapped)
        if weights.mapped is not None and not model.prepared:
            weights = FoundWeights("corrupt", "they could not be used: the log says why")
            status.found_weights(weights.result, weights.reason)
        artifacts = preparation.artifacts.result()

        runner = Runner(model, device, plan.table.largest.size)
        warmer = Warmer(runner, plan.table, status, timeline, options.compute.strict, loader.eager, tested)
        status.expect(plan.buckets, plan.device, plan.dtype, plan.step_buckets)
        backend = loader.open_packages(warmer, model, artifacts)
        for size in plan.step_buckets:
            status.update("decoder", size, "pending", backend.name)
        now = before_ready(backend.name, plan, options)
        warmer.warm(now, backend)
        if loader.jit is not None:
            loader.jit.settle()
        rehearses = not tested
        if not tested:
            with timeline.phase("self_test"):
                _, seconds = self_test(runner, now[0])
                rehearses = plan.device_type != "cpu" or seconds <= LONGEST_RUN_S
        publication = None if loader.jit is None else loader.jit.publish()
    cold = tuple(bucket for bucket in plan.step_table.buckets if bucket not in now)
    return StartedModel(
        checkpoint, plan, model, runner, warmer, backend, artifacts, cold, weights.result, rehearses, publication
    )


def _without_torch(preparation: Preparation) -> StartedModel | None:
    """Returns a warm model, or None if the packages or weights do not work without torch's module. Then the
    thread's CUDA stream may be another than the default one. Raises StartError if a setting does not fit, or the
    weights or the device are damaged."""
    from snapcap.warmup.start.native import NativeLoader  # noqa: PLC0415  only a start without torch needs it

    artifacts = preparation.artifacts.result()
    if artifacts is None:
        raise TypeError("a start without torch, and without packages")
    try:
        plan, options = preparation.planned.result().plan, preparation.options
        loader = NativeLoader(plan, artifacts, options, preparation.timeline)
        tested = _identity(artifacts, preparation.weights.result()[1].mapped)
        started = _bring_up(loader, preparation, tested=tested == options.tested)
        preparation.status.passed(tested)
        return started
    except StartError:
        raise
    except CaptureError as error:
        raise StartError(f"{error}; --no-prepared-weights starts another way") from error
    except Exception as error:
        fields = {"error": first_line(error)}
        _logger.warning("the start needs torch's module after all", exc_info=True, extra={"fields": fields})
        # The frames hold the buffers that the start allocated, and no garbage collector runs in a server.
        traceback.clear_frames(error.__traceback__)
        return None


def _identity(artifacts: Artifacts, mapped: "MappedWeights | None") -> str:
    """Returns a SHA-256, in hex, of the digests of the packages and of the prepared weights."""
    manifest = artifacts.fetched.manifest
    packages = {} if manifest is None else {name: blob.digest for name, blob in manifest.entries.items()}
    weights = [] if mapped is None else [mapped.header.key, *mapped.header.chunks]
    return hashlib.sha256(canonical_json([artifacts.key, packages, weights])).hexdigest()


def before_ready(backend: str, plan: Plan, options: StartOptions) -> tuple[Bucket, ...]:
    """Returns the buckets that are warm before READY. Other buckets are warmed between two steps of the first
    requests. ``backend``: the name of the backend that serves, which may differ from the option."""
    if backend == "eager" and options.compute.backend != "eager" and plan.device_type == "cuda":
        # Without artifacts the server serves at once: each bucket would wait for kernels that CUDA loads at launch.
        return plan.table.buckets[:1]
    # Packages are warm in a moment, jit would compile on the device thread while it serves, and on a CPU eager has
    # nothing to wait for.
    return plan.step_table.buckets if backend == "jit" else plan.table.buckets


def torch_is_needed(options: StartOptions) -> str | None:
    """Returns why torch's module must be imported if options and local files show it, so that the import begins at
    once; else None."""
    if options.compute.backend in ("eager", "jit"):
        return f"the {options.compute.backend} backend was asked for"
    if not options.model.prepared_weights:
        return "prepared weights are off"
    if may_be_published(options) or _has_prepared_weights(options):
        return None
    return "there are no prepared weights yet"


def wait_for_parts(preparation: Preparation) -> str | None:
    """Waits for all that a start without torch needs. Returns None when all of it is there, or the reason why torch
    is needed as soon as a part is known to be missing. Raises CheckpointError, ConfigError, StartError if the model
    cannot be served."""
    pending: set[Future[Any]] = {preparation.published, preparation.artifacts, preparation.weights}
    while pending:
        # A result may show that the start needs torch; then the other results are not waited for.
        pending = wait(pending, return_when=FIRST_COMPLETED).not_done
        reason = _missing_part(preparation)
        if reason is not None:
            return reason
    config, plan = preparation.planned.result()[1:]
    sizes = [size for size in plan.step_table.sizes if size > 1]
    if sizes and len(config.generation.eos_ids) > min(MAX_BEAMS, *sizes):
        return "more tokens end a caption than a compiled beam search looks at"
    return None


def _missing_part(preparation: Preparation) -> str | None:
    """Returns why torch is needed, by the steps of the preparation that are done; None if no part is missing."""
    options, published = preparation.options, preparation.published
    if published.done() and isinstance(published.result(), FoundWeights) and not _has_prepared_weights(options):
        return "there are no prepared weights of this model"
    if preparation.artifacts.done():
        artifacts = preparation.artifacts.result()
        if artifacts is None:
            return "there are no artifacts"
        if not artifacts.hit:
            return f"the start found artifacts: {artifacts.fetched.result}, {artifacts.fetched.reason}"
    if preparation.weights.done():
        _, weights = preparation.weights.result()
        if weights.mapped is None:
            return f"the start found prepared weights: {weights.result}, {weights.reason}"
    return None


def _has_prepared_weights(options: StartOptions) -> bool:
    return any((options.store_folder / WEIGHTS).glob("*.safetensors"))


def _require_room(preparation: Preparation) -> None:
    """Raises _SmallerPlanError if the plan needs more memory than its GPU has free."""
    plan = preparation.planned.result().plan
    if plan.device_type == "cpu":
        return
    from snapcap.warmup.plan.memory import fitted, free_here  # noqa: PLC0415  only a GPU needs it

    checkpoint, (_, weights) = preparation.checkpoint.result(), preparation.weights.result()
    prepared = 0 if weights.mapped is None else len(weights.mapped.memory)
    kept = fitted(checkpoint, plan, free_here(plan), prepared)
    if kept != plan:
        raise _SmallerPlanError(kept)


def _begin_import(reason: str, pool: ThreadPoolExecutor, timeline: Timeline) -> "Future[None]":
    """Import torch on a thread. ``reason``: why the import is needed. Raises StartError if torch's Python module is
    not installed."""
    if not has_torch_module():
        raise StartError(
            f"torch's libraries are installed here without its Python module, which is needed as {reason}; "
            "`snapcap build` where all of torch is makes what a start without it needs"
        )
    return pool.submit(_import_torch, timeline)


def _import_torch(timeline: Timeline) -> None:
    with timeline.phase("import_torch"):
        load_torch_libraries()
        importlib.import_module("torch")
