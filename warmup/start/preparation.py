"""Does the part of a start that needs no torch: fetches the checkpoint, makes the plan, fetches the artifacts.

    published ─ planned ─┬─ artifacts ─┐
                         └─ weights ───┴─ checkpoint

Each step is a task of a thread pool, and waits for the steps that it needs. ``Preparation`` lists them in order.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.fetch import Artifacts, Described, NotFetchedError
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
    from snapcap.warmup.weights.published import ModelFetcher

_logger = logging.getLogger("snapcap.start")


STEPS = 5  # the number of tasks below, each of which may wait on a thread of its own


class Planned(NamedTuple):
    """Holds the model's configuration, its folder, and the plan."""

    folder: Path
    config: "ModelConfig"
    plan: Plan


@dataclass(frozen=True)
class Callbacks:
    """Holds functions that a start calls on one of its threads.

    checkpoint: called with the checkpoint once the part of it that the start needs is on the local disk.
    artifacts: called with the result of the lookup of artifacts, or with None if the backend uses none."""

    checkpoint: Callable[[Checkpoint], object] = lambda checkpoint: None
    artifacts: Callable[[Artifacts | None], object] = lambda artifacts: None


NO_CALLBACKS = Callbacks()


@dataclass(eq=False)
class Preparation:
    """Begins the steps, in parallel with an import of torch. ``pool`` has ``STEPS`` threads for these steps.
    ``fetcher`` fetches a published model from the store; None if the store cannot have it. Each further member is
    the future result of a step, in the order in which the steps begin.

    published: the store's model, or the reason why the start does not use it.
    planned: the plan. On a CPU it is made without numpy, so that the lookup of artifacts need not wait for numpy's
        import.
    artifacts: the result of the lookup, or None if the backend uses no artifacts.
    weights: the prepared weights, and the checkpoint, which may still lack its weights.
    checkpoint: the checkpoint, with its weights unless there are prepared weights."""

    options: StartOptions
    timeline: Timeline
    status: StartupStatus
    pool: ThreadPoolExecutor
    fetcher: "ModelFetcher | None" = None
    callbacks: Callbacks = NO_CALLBACKS

    def __post_init__(self) -> None:
        pool = self.pool
        self.published = pool.submit(self._ask_store)
        self.planned = pool.submit(self._plan)
        self.artifacts = pool.submit(self._find_artifacts)
        self.weights = pool.submit(self._find_weights)
        self.checkpoint = pool.submit(self._complete)

    def _ask_store(self) -> Described | FoundWeights:
        if self.fetcher is None:
            return FoundWeights("off", "")
        with self.timeline.phase("fetch_weights"):
            try:
                return self.fetcher.describe()
            except NotFetchedError as error:
                found = FoundWeights(error.fetched.result, error.fetched.reason)
                _report_weights(found)
                return found

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
            self.callbacks.artifacts(None)
            return None
        _, config, plan = self.planned.result()
        with self.timeline.phase("fetch_artifacts"):
            found = find_artifacts(options, plan.factors(config, options.kind), self.fetcher)
        if CPU_LIBRARY not in found.fetched.entries:
            begin_torch_libraries()
        self.callbacks.artifacts(found)
        self.status.fetched(found)
        return found

    def _find_weights(self) -> tuple[Checkpoint, FoundWeights]:
        """Returns the checkpoint and its prepared weights. Weights are fetched after the packages, by the same
        worker process."""
        options, published = self.options, self.published.result()
        folder, config, plan = self.planned.result()
        checkpoint = Checkpoint.of(options, folder, config)
        if isinstance(published, FoundWeights):
            self.callbacks.checkpoint(checkpoint)
            weights = FoundWeights("off", "--no-prepared-weights")
            if options.model.prepared_weights:
                weights = find_weights(checkpoint, plan, options.store_folder)
            if weights.result == "miss" and published.result != "off":
                weights = published  # the result says why the store's weights were not used
        else:
            if self.fetcher is None:
                raise TypeError("a published model, and no fetcher")
            bring = partial(downloaded, options, published.found.weights.identity)
            checkpoint = replace(checkpoint, bring=bring)
            self.callbacks.checkpoint(checkpoint)
            with self.timeline.phase("fetch_weights"):
                wait([self.artifacts])
                weights = self.fetcher.weights(published, checkpoint, plan)
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
