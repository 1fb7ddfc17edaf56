"""Does the part of a start that needs no torch: brings the checkpoint, decides the plan, brings the artifacts."""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.checkpoints.patterns import CheckpointError
from snapcap.warmup.checkpoints.resolve import resolve_checkpoint
from snapcap.warmup.machine.torch_libraries import begin_torch_libraries
from snapcap.warmup.options import Kind, StartOptions
from snapcap.warmup.plan.artifacts import CPU_LIBRARY, Artifacts
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan, make_plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.store.fetch import Fetched, fetch
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.open import trust_of
from snapcap.warmup.store.store import WEIGHTS, StoreError
from snapcap.warmup.store.worker import StoreJob, fetch_in_worker
from snapcap.warmup.weights.find import FoundWeights, find_weights

if TYPE_CHECKING:
    from snapcap.models.config import ModelConfig
    from snapcap.warmup.weights.published.fetcher import Described, ModelFetcher

_logger = logging.getLogger("snapcap.start")


@dataclass(frozen=True)
class Preparation:
    """Holds the results of the work beside the import of torch: first the plan, then the checkpoint with its
    prepared weights, and the artifacts.

    artifacts: None if the backend uses none.
    unprepared: done as soon as it is known that there are no prepared weights, even before the checkpoint has come.
    """

    planned: "Future[tuple[ModelConfig, Plan]]"
    unprepared: "Future[None]"
    model: "Future[tuple[Checkpoint, Plan, FoundWeights]]"
    artifacts: "Future[Artifacts | None]"


def prepare(
    options: StartOptions,
    timeline: Timeline,
    status: StartupStatus,
    pool: ThreadPoolExecutor,
    on_checkpoint: Callable[[Checkpoint], object],
    fetcher: "ModelFetcher | None" = None,
) -> Preparation:
    """Begin the work on two threads of ``pool``.

    Args:
        on_checkpoint: called with the checkpoint, on either thread.
        fetcher: brings the model from the store, if it may be published there.
    """
    work = _Work(options, timeline, status, on_checkpoint, fetcher)
    model, artifacts = pool.submit(work.model), pool.submit(work.artifacts)
    return Preparation(work.planned, work.unprepared, model, artifacts)


def find_artifacts(
    config: "ModelConfig", plan: Plan, options: StartOptions, kind: Kind, fetcher: "ModelFetcher | None" = None
) -> Artifacts:
    """Bring the artifact set of this plan to the local folder, verified, or say why there is none. ``fetcher``:
    asks a remote store, as it has a process for that by then.

    Raises:
        StartError: the store must not be opened as configured.
    """
    trust = trust_of(options.store)
    factors = plan.factors(config, kind)
    key = artifact_key(factors)
    store = options.store
    try:
        if store.remote is not None:
            job = StoreJob.of(options, key, factors)
            fetched = fetch_in_worker(job, trust, None if fetcher is None else fetcher.packages)
        else:
            fetched = fetch(None, FolderStore.open(options.store_folder), key, factors, trust, store.deadline)
    except StoreError as error:  # the local folder: without it nothing can be loaded, but eager can be served
        fetched = Fetched("error", str(error))
    specs = fetched.manifest.metadata.get("signatures") if fetched.manifest else None
    return Artifacts(key, factors, fetched, specs if isinstance(specs, dict) else {})


@dataclass
class _Work:
    """The work of both threads. ``packages_over``: set when the search for packages has ended."""

    options: StartOptions
    timeline: Timeline
    status: StartupStatus
    on_checkpoint: Callable[[Checkpoint], object]
    fetcher: "ModelFetcher | None"
    planned: "Future[tuple[ModelConfig, Plan]]" = field(default_factory=Future)
    unprepared: "Future[None]" = field(default_factory=Future)
    packages_over: threading.Event = field(default_factory=threading.Event)

    def artifacts(self) -> Artifacts | None:
        options = self.options
        try:
            if options.compute.backend == "eager":
                return None
            config, plan = self.planned.result()
            with self.timeline.phase("fetch_artifacts"):
                found = find_artifacts(config, plan, options, options.kind, self.fetcher)
            if CPU_LIBRARY not in found.fetched.entries:
                begin_torch_libraries()
            self.status.fetched(found)
            return found
        finally:
            self.packages_over.set()

    def model(self) -> tuple[Checkpoint, Plan, FoundWeights]:
        """``planned`` is there first: for what need not wait for numpy."""
        try:
            with self.timeline.phase("fetch_weights"):
                published = self._published()
                folder = _resolved(self.options) if isinstance(published, FoundWeights) else published.folder
                checkpoint, plan = self._planned(folder)
        except BaseException as error:
            if not self.planned.done():
                self.planned.set_exception(error)
            raise
        if isinstance(published, FoundWeights):
            self.on_checkpoint(checkpoint)
            weights = _find_weights(checkpoint, plan, self.options)
            if weights.result == "miss" and published.result != "off":
                weights = published  # they would have spared the checkpoint
        else:
            bring = partial(_brought, self.options, published.found.manifest.identity)
            checkpoint = replace(checkpoint, bring=bring)
            self.on_checkpoint(checkpoint)
            checkpoint, weights = self._fetched(published, checkpoint, plan)
        _report_weights(weights)
        self.status.found_weights(weights.result, weights.reason, weights.bytes_fetched)
        return checkpoint, plan, weights

    def _planned(self, folder: Path) -> tuple[Checkpoint, Plan]:
        from snapcap.warmup.plan.chat_record import read_config  # noqa: PLC0415  a server must not wait for it before it listens

        options = self.options
        config = read_config(folder, options.store_folder)
        if config.generation.not_done:
            fields = {"settings": ", ".join(config.generation.not_done)}
            _logger.warning("generation settings of the checkpoint are not done", extra={"fields": fields})
        plan = make_plan(config, options)
        if not plan.may_be_standalone:
            begin_torch_libraries()
        self.planned.set_result((config, plan))
        return Checkpoint.of(options.model.source, folder, config, options.images.max_pixels), plan

    def _published(self) -> "Described | FoundWeights":
        """The model as the store has it, or why it is not to be had there."""
        if self.fetcher is None:
            return FoundWeights("off", "")
        from snapcap.warmup.weights.published.fetch import NotFetchedError  # noqa: PLC0415  no other start needs it

        try:
            return self.fetcher.describe()
        except NotFetchedError as error:
            if next((self.options.store_folder / WEIGHTS).glob("*.safetensors"), None) is None:
                self.unprepared.set_result(None)
            _report_weights(FoundWeights(error.result, error.reason))
            return FoundWeights(error.result, error.reason)

    def _fetched(
        self, published: "Described", checkpoint: Checkpoint, plan: Plan
    ) -> tuple[Checkpoint, FoundWeights]:
        """The weights of a published model; or the whole checkpoint, where they do not come."""
        if self.fetcher is None:
            raise TypeError("a published model without who fetches it")
        with self.timeline.phase("fetch_weights"):
            self.packages_over.wait()
            weights = self.fetcher.weights(published, checkpoint, plan)
            if weights.mapped is None:
                self.unprepared.set_result(None)
                checkpoint = checkpoint.whole()
        return checkpoint, weights


def _resolved(options: StartOptions) -> Path:
    return resolve_checkpoint(options.model.source, options.model.cache_dir, options.s3)


def _brought(options: StartOptions, identity: Mapping[str, str]) -> Path:
    """The folder of the checkpoint of this revision: its configuration and tokenizer are in use by now."""
    from snapcap.warmup.weights.published.source import downloaded_identity  # noqa: PLC0415  no other start needs it

    folder = _resolved(options)
    if dict(downloaded_identity(options.model.source, folder)) != dict(identity):
        raise CheckpointError(f"{options.model.source!r} was changed while this server started; start it again")
    return folder


def _report_weights(found: FoundWeights) -> None:
    level = logging.INFO if found.result in ("hit", "miss", "off") else logging.WARNING
    _logger.log(level, "prepared weights", extra={"fields": {"result": found.result, "reason": found.reason}})


def _find_weights(checkpoint: Checkpoint, plan: Plan, options: StartOptions) -> FoundWeights:
    if not options.model.prepared_weights:
        return FoundWeights("off", "--no-prepared-weights")
    return find_weights(checkpoint, plan, options.store_folder)


def read_checkpoint(options: StartOptions) -> Checkpoint:
    """Bring the checkpoint's files to this machine and read all but the weights.

    Raises:
        CheckpointError, ConfigError: the source or its files cannot be used.
    """
    from snapcap.warmup.plan.chat_record import read_config  # noqa: PLC0415  loaded only when needed

    folder = _resolved(options)
    config = read_config(folder, options.store_folder)
    return Checkpoint.of(options.model.source, folder, config, options.images.max_pixels)
