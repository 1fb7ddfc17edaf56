"""Does the part of a start that needs no torch: brings the checkpoint, decides the plan, brings the artifacts."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.checkpoints.resolve import resolve_checkpoint
from snapcap.warmup.options import Kind, StartOptions
from snapcap.warmup.plan.artifacts import Artifacts
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan, make_plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.store.fetch import Fetched, fetch
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.open import trust_of
from snapcap.warmup.store.store import StoreError
from snapcap.warmup.store.worker import StoreJob, fetch_in_worker
from snapcap.warmup.weights.find import FoundWeights, find_weights

if TYPE_CHECKING:
    from snapcap.models.config import ModelConfig

_logger = logging.getLogger("snapcap.start")


@dataclass(frozen=True)
class Preparation:
    """What runs beside the import of torch: first the plan, then the rest of the checkpoint with its prepared
    weights, the artifacts, and a GPU's context, for which nobody has to wait.

    ``artifacts`` is None where the backend uses none.
    """

    planned: "Future[tuple[ModelConfig, Plan]]"
    model: "Future[tuple[Checkpoint, Plan, FoundWeights]]"
    artifacts: "Future[Artifacts | None]"


def prepare(
    options: StartOptions,
    timeline: Timeline,
    status: StartupStatus,
    pool: ThreadPoolExecutor,
    on_checkpoint: Callable[[Checkpoint], object],
) -> Preparation:
    """Begin on two threads of ``pool``. One of them calls ``on_checkpoint``."""
    planned: Future[tuple[ModelConfig, Plan]] = Future()
    model = pool.submit(_model, options, timeline, status, planned, on_checkpoint)

    def artifacts() -> Artifacts | None:
        if options.compute.backend == "eager":
            return None
        config, plan = planned.result()
        with timeline.phase("fetch_artifacts"):
            found = find_artifacts(config, plan, options, options.kind)
        status.fetched(found)
        return found

    return Preparation(planned, model, pool.submit(artifacts))


def find_artifacts(config: "ModelConfig", plan: Plan, options: StartOptions, kind: Kind) -> Artifacts:
    """Bring the artifact set of this plan to the local folder, verified, or say why there is none.

    Raises:
        StartError: the store must not be opened as configured.
    """
    trust = trust_of(options.store)
    factors = plan.factors(config, kind)
    key = artifact_key(factors)
    store = options.store
    try:
        if store.remote is not None:
            fetched = fetch_in_worker(StoreJob.of(options, key, factors), trust)
        else:
            fetched = fetch(None, FolderStore.open(options.store_folder), key, factors, trust, store.deadline)
    except StoreError as error:  # the local folder: without it nothing can be loaded, but eager can be served
        fetched = Fetched("error", str(error))
    specs = fetched.manifest.metadata.get("signatures") if fetched.manifest else None
    return Artifacts(key, factors, fetched, specs if isinstance(specs, dict) else {})


def _model(
    options: StartOptions,
    timeline: Timeline,
    status: StartupStatus,
    planned: "Future[tuple[ModelConfig, Plan]]",
    on_checkpoint: Callable[[Checkpoint], object],
) -> tuple[Checkpoint, Plan, FoundWeights]:
    """``planned`` is there first: for what need not wait for numpy."""
    try:
        with timeline.phase("fetch_weights"):
            folder, config = _described(options)
            plan = make_plan(config, options)
            planned.set_result((config, plan))
            checkpoint = Checkpoint.of(options.model.source, folder, config, options.images.max_pixels)
        on_checkpoint(checkpoint)
        weights = _find_weights(checkpoint, plan, options)
        status.found_weights(weights.result, weights.reason)
    except BaseException as error:
        if not planned.done():
            planned.set_exception(error)
        raise
    return checkpoint, plan, weights


def _find_weights(checkpoint: Checkpoint, plan: Plan, options: StartOptions) -> FoundWeights:
    if not options.model.prepared_weights:
        return FoundWeights("off", "--no-prepared-weights")
    found = find_weights(checkpoint, plan, options.store_folder)
    level = logging.WARNING if found.result == "corrupt" else logging.INFO
    _logger.log(level, "prepared weights", extra={"fields": {"result": found.result, "reason": found.reason}})
    return found


def read_checkpoint(options: StartOptions) -> Checkpoint:
    """Bring the checkpoint's files to this machine and read all but the weights.

    Raises:
        CheckpointError, ConfigError: the source or its files cannot be used.
    """
    folder, config = _described(options)
    return Checkpoint.of(options.model.source, folder, config, options.images.max_pixels)


def _described(options: StartOptions) -> "tuple[Path, ModelConfig]":
    from snapcap.models.config import ModelConfig  # noqa: PLC0415  a server must not wait for it before it listens

    folder = resolve_checkpoint(options.model.source, options.model.cache_dir, options.s3)
    return folder, ModelConfig.from_folder(folder)
