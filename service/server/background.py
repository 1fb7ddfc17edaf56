"""Starts the work after READY in the engine process: a build of artifacts, and the preparation of weights."""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.service.readiness import BackgroundWork
from snapcap.warmup.progress.status import StartupStatus

if TYPE_CHECKING:
    from snapcap.service.engine.engine import Engine
    from snapcap.warmup.options import StartOptions
    from snapcap.warmup.start.start import StartedModel

_build_logger = logging.getLogger("snapcap.build")
_weights_logger = logging.getLogger("snapcap.weights")


def start_build(
    options: "StartOptions", loaded: "StartedModel", status: StartupStatus, engine: "Engine"
) -> Callable[[], object]:
    """Schedules a build if artifacts are missing, or if the store could not be read and must be asked again.
    Returns a function that ends the build."""
    if loaded.compiled or options.compute.backend not in ("auto", "aot"):
        return lambda: None
    if options.store.build == "off":
        found = loaded.artifacts
        if options.store.remote is None or found is None or found.fetched.result != "error":
            return lambda: None

    def begin(work: BackgroundWork) -> None:
        try:
            from snapcap.warmup.start.background_build import BackgroundBuild  # noqa: PLC0415  only starts without artifacts need it

            build = BackgroundBuild(loaded, options, status, partial(engine.call, doing="swap a bucket in"))
        except Exception as error:  # no other thread would report it
            status.building(state="failed", error=f"{type(error).__name__}: {error}")
            _build_logger.exception("build failed unexpectedly; eager goes on serving")
            return
        if work.keep(build.stop):
            build.start()

    return BackgroundWork(begin).end


def start_preparing(options: "StartOptions", loaded: "StartedModel") -> Callable[[], object]:
    """Schedules the preparation of weights, in a process. Returns a function that ends it."""
    if loaded.weights in ("hit", "off"):
        return lambda: None

    def prepare(work: BackgroundWork) -> None:
        try:
            from snapcap.warmup.artifacts.store import WEIGHTS  # noqa: PLC0415  starts do without it
            from snapcap.warmup.machine.worker import LOWEST_PRIORITY  # noqa: PLC0415  starts do without it
            from snapcap.warmup.weights.prepare import prepare_in_worker, weights_worker  # noqa: PLC0415  starts do without it

            if not _is_writable(options.store_folder / WEIGHTS):
                _weights_logger.info("weights are not prepared: the artifact folder is read-only")
                return
            worker = weights_worker(loaded.checkpoint.folder, loaded.plan, options, LOWEST_PRIORITY)
            if not work.keep(worker.stop):
                return
            prepared = prepare_in_worker(worker, thorough=loaded.weights == "corrupt")
        except Exception:  # no other thread would report it
            _weights_logger.exception("weights could not be prepared; the next start reads the checkpoint again")
            return
        if not work.ended.is_set():
            level = logging.WARNING if prepared.result == "skipped" else logging.INFO
            fields = {"result": prepared.result, "reason": prepared.reason}
            _weights_logger.log(level, "weights for the next start", extra={"fields": fields})

    return BackgroundWork(prepare).end


def _is_writable(folder: Path) -> bool:
    """Returns whether files can be made in a folder, or, if it does not exist, in the nearest parent that does."""
    while not os.access(folder, os.F_OK):
        folder = folder.parent
    return os.access(folder, os.W_OK)
