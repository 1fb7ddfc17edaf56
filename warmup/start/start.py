"""Starts a model, from a bare process to a warm runner, and decides what overlaps what.

    thread          checkpoint ─ plan ─┐ prepared weights ──────┐
    thread                             └─ fetch artifacts ──────┤
    thread (cuda)   driver and context ─────────────────────────┤
    threads         torch's libraries ─ open packages ──────────┤
    device thread                                               └ device ─ weights ─ warm ─ self-test ─ ready

So it is where packages and prepared weights are found (`native`), and torch's Python module is not imported. Where
the machine has no checkpoint, the first thread asks the store for the model (`weights.published`), before it brings
the checkpoint. Every other start imports it on a thread, which takes longer than all of that.

Nothing here imports torch before `import_torch`, so a server that has bound its port answers meanwhile.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from snapcap.models.weights.listing import WeightsError
from snapcap.warmup.errors import StartError
from snapcap.warmup.machine.device_context import begin_device_context
from snapcap.warmup.machine.installation import has_torch_module
from snapcap.warmup.machine.torch_libraries import load_torch_libraries
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.artifacts import Artifacts
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.start.native import find_without_torch, start_without_torch, torch_is_needed
from snapcap.warmup.start.preparation import Preparation, prepare
from snapcap.warmup.start.published import begin_fetcher, close_behind
from snapcap.warmup.start.started import StartedModel
from snapcap.warmup.weights.find import FoundWeights

if TYPE_CHECKING:
    from snapcap.warmup.runtime.backends.base import Backend
    from snapcap.warmup.runtime.loaded_model import LoadedModel
    from snapcap.warmup.start.jit.start import Jit
    from snapcap.warmup.weights.published.fetcher import ModelFetcher

SWITCH_INTERVAL_S = 0.0001
_logger = logging.getLogger("snapcap.start")


def load(
    options: StartOptions,
    timeline: Timeline,
    status: StartupStatus,
    on_checkpoint: Callable[[Checkpoint], object] = lambda checkpoint: None,
    fetcher: "ModelFetcher | None" = None,
) -> StartedModel:
    """Run the start on the calling thread, which becomes the device thread. Another one calls ``on_checkpoint``
    once the checkpoint is on local disk, or what a start needs of it. ``fetcher``: who was begun with for these
    options.

    Raises:
        CheckpointError, ConfigError, WeightsError: the model cannot be served.
        StartError: a setting does not fit, or the start is strict and not what was asked for.
    """
    try:
        return _load(options, timeline, status, on_checkpoint, fetcher)
    except _SmallerPlanError as error:  # a smaller plan has another key, and so other artifacts
        compute = replace(options.compute, buckets=error.buckets)
        return _load(replace(options, compute=compute), timeline, status, lambda _: None, None)


class _SmallerPlanError(Exception):
    """The device has no room for the largest buckets."""

    def __init__(self, buckets: tuple[int, ...]) -> None:
        super().__init__(f"buckets {buckets} fit")
        self.buckets = buckets


def _require_room(preparation: Preparation) -> None:
    """Raises:
    _SmallerPlanError: the plan needs more memory than its GPU has free.
    """
    checkpoint, plan, weights = preparation.model.result()
    if plan.device_type == "cpu":
        return
    from snapcap.warmup.plan.room import fitted, free_here  # noqa: PLC0415  only a GPU needs it

    prepared = 0 if weights.mapped is None else len(weights.mapped.memory)
    kept = fitted(checkpoint, plan, free_here(plan), prepared).buckets
    if kept != plan.buckets:
        raise _SmallerPlanError(kept)


def _load(
    options: StartOptions,
    timeline: Timeline,
    status: StartupStatus,
    on_checkpoint: Callable[[Checkpoint], object],
    fetcher: "ModelFetcher | None",
) -> StartedModel:
    with contextlib.ExitStack() as scope:
        # A thread that waits for Python's lock asks for it after this interval, by default 0.005 s. Threads beside
        # the import of torch ask hundreds of times.
        scope.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        pool = scope.enter_context(ThreadPoolExecutor(3, thread_name_prefix="snapcap-fetch"))
        begin_device_context(options.compute.device)
        fetcher = fetcher or begin_fetcher(options)
        reason = torch_is_needed(options)
        importing = None if reason is None else _begin_import(reason, pool, timeline)
        preparation = prepare(options, timeline, status, pool, on_checkpoint, fetcher)
        close_behind(fetcher, [preparation.model, preparation.artifacts])
        if importing is None:
            found = find_without_torch(preparation)
            if isinstance(found, str):
                reason = found
            else:
                _require_room(preparation)
                started = start_without_torch(found, options, timeline, status)
                if started is not None:
                    return started
                reason = "what there is does not work, as the log says"
            importing = _begin_import(reason, pool, timeline)
        importing.result()
        _require_room(preparation)
        return _load_with_torch(preparation, options, timeline, status)


def _load_with_torch(
    preparation: Preparation, options: StartOptions, timeline: Timeline, status: StartupStatus
) -> StartedModel:
    """The rest of a start whose process has torch's module."""
    with contextlib.ExitStack() as scope:
        jit = None
        if options.compute.backend == "jit":
            from snapcap.warmup.start.jit.start import open_compiler  # noqa: PLC0415  no other start needs it

            jit = scope.enter_context(open_compiler(options, timeline, status))
        checkpoint, plan, weights = preparation.model.result()

        from snapcap.warmup.runtime.backends.eager import EagerBackend  # noqa: PLC0415  these import torch
        from snapcap.warmup.runtime.devices.torch_settings import (  # noqa: PLC0415
            avoid_driver_compilation,
            open_device,
            torch_device,
        )
        from snapcap.warmup.runtime.loaded_model import load_model  # noqa: PLC0415
        from snapcap.warmup.runtime.runner import Runner  # noqa: PLC0415
        from snapcap.warmup.start.warmer import Warmer, self_test  # noqa: PLC0415

        with timeline.phase("device_init"):
            device, dtype = open_device(plan)
            if jit is None:
                avoid_driver_compilation()
        with timeline.phase("load_weights"):
            described = checkpoint.config, checkpoint.transform, plan, device, dtype
            try:
                model = load_model(checkpoint.folder, *described, weights.mapped)
            except WeightsError:
                if checkpoint.bring is None:
                    raise
                checkpoint = checkpoint.whole()  # published weights could not be used: the log says why
                model = load_model(checkpoint.folder, *described)
        if weights.mapped is not None and not model.prepared:
            weights = FoundWeights("corrupt", "they could not be used: the log says why")
            status.found_weights(weights.result, weights.reason)
        artifacts = preparation.artifacts.result()

        runner = Runner(model, torch_device(device))
        warmer = Warmer(runner, plan.table, status, timeline, options.compute.strict, EagerBackend())
        status.expect(plan.buckets, plan.device, plan.dtype)
        with timeline.phase("load_artifacts"):
            backend = _backend(options, artifacts, plan, model, jit) or EagerBackend()
            warmer.assign(backend, plan.table.buckets)
        buckets = plan.table.buckets
        now = before_ready(backend.name, buckets, options, device.type)
        warmer.warm(now)
        if jit is not None:
            jit.settle()
        with timeline.phase("self_test"):
            self_test(runner, buckets[0])
        publication = None if jit is None else jit.publish()
    cold = buckets[len(now) :]
    return StartedModel(checkpoint, plan, model, runner, warmer, artifacts, cold, weights.result, publication)


def before_ready(
    backend: str, buckets: tuple[Bucket, ...], options: StartOptions, device_type: str
) -> tuple[Bucket, ...]:
    """The buckets that are warm before READY; the others are warmed between two steps of the first requests.
    ``backend`` is what serves, and not what was asked for."""
    if backend == "aot":
        return options.before_ready(buckets)
    if backend == "eager" and options.compute.backend != "eager" and device_type == "cuda":
        # No artifacts: serve at once. Here each bucket waits for kernels that CUDA loads when they are launched.
        return buckets[:1]
    # jit would compile on the device thread while it serves, and on a CPU eager has nothing to wait for.
    return buckets


def _begin_import(reason: str, pool: ThreadPoolExecutor, timeline: Timeline) -> "Future[None]":
    """Import torch on a thread.

    Raises:
        StartError: there is no such module; ``reason``: why it is needed.
    """
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


def _backend(
    options: StartOptions,
    artifacts: Artifacts | None,
    plan: Plan,
    model: "LoadedModel",
    jit: "Jit | None",
) -> "Backend | None":
    """Returns the backend that runs compiled code, or None if the start stays eager."""
    if artifacts is None or (options.compute.backend == "jit" and jit is None):
        return None
    if not artifacts.hit:
        _report_missing(artifacts, options)
    if jit is not None:
        return jit.backend(plan, artifacts)
    if not artifacts.hit:
        return None
    from snapcap.warmup.runtime.aoti.torch_packages import torch_backend  # noqa: PLC0415  imports torch

    return torch_backend(artifacts.fetched.entries, artifacts.input_specs, model)


def _report_missing(artifacts: Artifacts, options: StartOptions) -> None:
    """Say what the start does without artifacts; `aot` that was asked for by name is an error, others a note.

    Raises:
        StartError: the start is strict.
    """
    fetched = artifacts.fetched
    if options.compute.strict and options.compute.backend == "aot":
        raise StartError(f"the aot backend has no artifacts: {fetched.result}: {fetched.reason}")
    instead = {"compiling": "now"} if options.compute.backend == "jit" else {"serving": "eager"}
    fields = {"result": fetched.result, "reason": fetched.reason, "key": artifacts.key[:12], **instead}
    level = logging.INFO if options.compute.backend != "aot" and fetched.result == "miss" else logging.ERROR
    _logger.log(level, "no artifacts", extra={"fields": fields})
