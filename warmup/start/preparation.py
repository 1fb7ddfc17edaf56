"""Does the part of a start that needs no torch: brings the checkpoint, decides the plan, brings the artifacts.

    published ─ planned ─┬─ artifacts ─┐
                         └─ weights ───┴─ checkpoint

Each step is a task of a pool that waits for the steps it needs. ``Preparation`` lists them in their order.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.fetch import Artifacts, NotFetchedError
from snapcap.warmup.artifacts.manifest import CPU_LIBRARY
from snapcap.warmup.artifacts.worker import find_artifacts
from snapcap.warmup.machine.torch_libraries import begin_torch_libraries
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint, config_of, downloaded, resolved
from snapcap.warmup.plan.plan import Plan, make_plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.weights.find import FoundWeights, find_weights

if TYPE_CHECKING:
    from snapcap.models.config import ModelConfig
    from snapcap.warmup.weights.published import Described, ModelFetcher

_logger = logging.getLogger("snapcap.start")


STEPS = 5  # the number of tasks below, each of which may wait on a thread of its own


class Planned(NamedTuple):
    """Holds the configuration of the model, the folder it was read from, and the plan that was made of it."""

    folder: Path
    config: "ModelConfig"
    plan: Plan


@dataclass(frozen=True)
class Callbacks:
    """Functions that a start calls on one of its threads, each with what it is named after.

    checkpoint: called once the checkpoint is on local disk, or the part of it that a start needs.
    artifacts: called once the artifacts were looked for. The argument is None if the backend uses none.
    """

    checkpoint: Callable[[Checkpoint], object] = lambda checkpoint: None
    artifacts: Callable[[Artifacts | None], object] = lambda artifacts: None


NO_CALLBACKS = Callbacks()


class Preparation:
    """Begins the steps beside the import of torch. Each member below is the result of a step, in the order in which
    they begin.

    published: the model as the store has it, or the reason why the start does not take it from there.
    planned: known before numpy is imported, which the checkpoint needs and the artifacts do not.
    artifacts: None if the backend uses none.
    weights: the prepared weights, and the checkpoint as it is until then, perhaps without weights of its own.
    checkpoint: the checkpoint with weights of its own, unless there are prepared ones.
    """

    def __init__(
        self,
        options: StartOptions,
        timeline: Timeline,
        status: StartupStatus,
        pool: ThreadPoolExecutor,
        fetcher: "ModelFetcher | None" = None,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> None:
        """``pool`` has ``STEPS`` threads for this. ``fetcher`` brings the model from the store, if it may be
        published there."""
        self.options, self.timeline, self.status = options, timeline, status
        self._fetcher, self._callbacks = fetcher, callbacks
        self.published = pool.submit(self._ask_store)
        self.planned = pool.submit(self._plan)
        self.artifacts = pool.submit(self._find_artifacts)
        self.weights = pool.submit(self._find_weights)
        self.checkpoint = pool.submit(self._complete)

    def _ask_store(self) -> "Described | FoundWeights":
        if self._fetcher is None:
            return FoundWeights("off", "")
        with self.timeline.phase("fetch_weights"):
            try:
                return self._fetcher.describe()
            except NotFetchedError as error:
                _report_weights(FoundWeights(error.result, error.reason))
                return FoundWeights(error.result, error.reason)

    def _plan(self) -> Planned:
        options, published = self.options, self.published.result()
        with self.timeline.phase("fetch_weights"):
            folder = resolved(options) if isinstance(published, FoundWeights) else published.folder
            config = config_of(options, folder)
            if config.generation.not_done:
                fields = {"settings": ", ".join(config.generation.not_done)}
                _logger.warning("generation settings of the checkpoint are not done", extra={"fields": fields})
            plan = make_plan(config, options)
        if not plan.may_be_standalone:
            begin_torch_libraries()
        return Planned(folder, config, plan)

    def _find_artifacts(self) -> Artifacts | None:
        options = self.options
        if options.compute.backend == "eager":
            self._callbacks.artifacts(None)
            return None
        _, config, plan = self.planned.result()
        with self.timeline.phase("fetch_artifacts"):
            found = find_artifacts(options, plan.factors(config, options.kind), self._fetcher)
        if CPU_LIBRARY not in found.fetched.entries:
            begin_torch_libraries()
        self._callbacks.artifacts(found)
        self.status.fetched(found)
        return found

    def _find_weights(self) -> tuple[Checkpoint, FoundWeights]:
        """Returns the checkpoint and its prepared weights. Weights are fetched after the packages, by the same
        worker process."""
        options, published = self.options, self.published.result()
        folder, config, plan = self.planned.result()
        checkpoint = Checkpoint.of(options, folder, config)
        if isinstance(published, FoundWeights):
            self._callbacks.checkpoint(checkpoint)
            weights = FoundWeights("off", "--no-prepared-weights")
            if options.model.prepared_weights:
                weights = find_weights(checkpoint, plan, options.store_folder)
            if weights.result == "miss" and published.result != "off":
                weights = published  # they would have spared the checkpoint
        else:
            if self._fetcher is None:
                raise TypeError("a published model, and no fetcher")
            bring = partial(downloaded, options, published.found.weights.identity)
            checkpoint = replace(checkpoint, bring=bring)
            self._callbacks.checkpoint(checkpoint)
            with self.timeline.phase("fetch_weights"):
                wait([self.artifacts])
                weights = self._fetcher.weights(published, checkpoint, plan)
        _report_weights(weights)
        self.status.found_weights(weights.result, weights.reason, weights.bytes_fetched)
        return checkpoint, weights

    def _complete(self) -> Checkpoint:
        checkpoint, weights = self.weights.result()
        if weights.mapped is not None or checkpoint.bring is None:
            return checkpoint
        with self.timeline.phase("fetch_weights"):
            return checkpoint.whole()


def _report_weights(found: FoundWeights) -> None:
    level = logging.INFO if found.result in ("hit", "miss", "off") else logging.WARNING
    _logger.log(level, "prepared weights", extra={"fields": {"result": found.result, "reason": found.reason}})
