"""The start: what overlaps what, from a bare process to a warm runner.

    device thread   import torch ───────────────┐   (jit: and the compiler)
    thread          checkpoint ─ plan ─┐        ├─ device ─ weights ─┬─ packages ───┬─ warm ─ self-test ─ ready
    thread                             ├─ fetch artifacts ───────────┤              │
    thread (cuda)                      └─ context                    └─ libraries' kernels

Nothing here imports torch before `import_torch`, so a server that has bound its port answers meanwhile.
"""

import contextlib
import importlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmup.buckets import Bucket, BucketTable
from warmup.options import StartOptions
from warmup.plan import Plan, StartError
from warmup.prepare import prepare
from warmup.prepared import Artifacts, Checkpoint
from warmup.status import StartupStatus
from warmup.timeline import Timeline
from warmup.torch_libraries import load_torch_libraries

if TYPE_CHECKING:
    from warmup.backends.base import Backend
    from warmup.jit_start import Jit
    from warmup.loading import Warmer
    from warmup.model import LoadedModel
    from warmup.publish import Published
    from warmup.runner import Runner

_logger = logging.getLogger("snapcap.start")


@dataclass(frozen=True)
class Loaded:
    """What serves: a runner, warm but for the buckets of ``cold``, which `--ready-when first` leaves for later.

    ``publication``: of the jit backend, what comes of publishing what it compiled.
    """

    checkpoint: Checkpoint
    plan: Plan
    model: "LoadedModel"
    runner: "Runner"
    warmer: "Warmer"
    artifacts: Artifacts | None
    cold: tuple[Bucket, ...]
    publication: "Future[list[Published]] | None" = None

    @property
    def warm_table(self) -> BucketTable:
        """The buckets that may serve by now."""
        cold = {bucket.size for bucket in self.cold}
        return BucketTable.of(size for size in self.plan.buckets if size not in cold)

    @property
    def compiled(self) -> bool:
        """Whether every bucket came from artifacts."""
        return self.artifacts is not None and self.artifacts.hit


def load(
    options: StartOptions,
    timeline: Timeline,
    status: StartupStatus,
    on_checkpoint: Callable[[Checkpoint], object] = lambda checkpoint: None,
) -> Loaded:
    """Run the start on the calling thread, which becomes the device thread. Another one calls ``on_checkpoint``
    once the checkpoint is on local disk.

    Raises:
        CheckpointError, ConfigError, WeightsError: the model cannot be served.
        StartError: a setting does not fit, or the start is strict and not what was asked for.
    """
    with contextlib.ExitStack() as scope:
        pool = scope.enter_context(ThreadPoolExecutor(3, thread_name_prefix="snapcap-fetch"))
        preparation = prepare(options, timeline, status, pool, on_checkpoint)
        with timeline.phase("import_torch"):
            load_torch_libraries()
            importlib.import_module("torch")
        jit = None
        if options.backend == "jit":
            from warmup.jit_start import open_compiler  # noqa: PLC0415  of no other start

            jit = scope.enter_context(open_compiler(options, timeline, status))
        checkpoint, plan = preparation.model.result()

        from warmup.backends.eager import EagerBackend  # noqa: PLC0415  these import torch
        from warmup.device import open_device  # noqa: PLC0415
        from warmup.library_kernels import loading_library_kernels  # noqa: PLC0415
        from warmup.loading import Warmer, self_test  # noqa: PLC0415
        from warmup.model import load_model  # noqa: PLC0415
        from warmup.runner import Runner  # noqa: PLC0415

        with timeline.phase("device_init"):
            device, dtype = open_device(plan)
        with timeline.phase("load_weights"):
            model = load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, device, dtype)
        artifacts = preparation.artifacts.result()

        runner = Runner(model.config, model.regions, model.weights, model.state)
        warmer = Warmer(runner, plan.table, status, timeline, options.strict)
        status.expect(plan.buckets, plan.device, plan.dtype)
        with timeline.phase("load_artifacts"):
            backend = _backend(options, artifacts, plan, model, jit) or EagerBackend()
            buckets, packages = plan.table.buckets, backend.name == "aot"
            # Others are ready at once when they are warm: eager has nothing worth leaving for later, and jit would
            # compile on the device thread while it serves.
            now = buckets[:1] if options.ready_when == "first" and packages else buckets
            with loading_library_kernels(model, now) if packages else contextlib.nullcontext():
                warmer.assign(backend)
        warmer.warm(now)
        if jit is not None:
            jit.settle()
        with timeline.phase("self_test"):
            self_test(runner, buckets[0])
        publication = None if jit is None else jit.publish()
    cold = buckets[len(now) :]
    return Loaded(checkpoint, plan, model, runner, warmer, artifacts, cold, publication)


def _backend(
    options: StartOptions, artifacts: Artifacts | None, plan: Plan, model: "LoadedModel", jit: "Jit | None"
) -> "Backend | None":
    """What runs compiled code; None where the start stays eager."""
    if artifacts is None or (options.backend == "jit" and jit is None):
        return None
    if not artifacts.hit:
        _report_missing(artifacts, options)
    if jit is not None:
        return jit.backend(plan, artifacts)
    if not artifacts.hit:
        return None
    from warmup.backends.aot import AotBackend  # noqa: PLC0415  imports torch

    return AotBackend(artifacts.fetched.entries, artifacts.signatures, model)


def _report_missing(artifacts: Artifacts, options: StartOptions) -> None:
    """Say what the start does without artifacts; `aot` that was asked for by name is an error, others a note.

    Raises:
        StartError: the start is strict.
    """
    fetched = artifacts.fetched
    if options.strict and options.backend == "aot":
        raise StartError(f"the aot backend has no artifacts: {fetched.result}: {fetched.reason}")
    instead = {"compiling": "now"} if options.backend == "jit" else {"serving": "eager"}
    fields = {"result": fetched.result, "reason": fetched.reason, "key": artifacts.key[:12], **instead}
    level = logging.INFO if options.backend != "aot" and fetched.result == "miss" else logging.ERROR
    _logger.log(level, "no artifacts", extra={"fields": fields})
