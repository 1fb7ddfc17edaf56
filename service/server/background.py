"""Starts the background work of a server that is ready: builds artifacts and prepares weights for later starts."""

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.service.readiness import after_ready

if TYPE_CHECKING:
    from concurrent.futures import Future

    from snapcap.service.engine.engine import Engine
    from snapcap.warmup.options import StartOptions
    from snapcap.warmup.progress.status import StartupStatus
    from snapcap.warmup.start.start import StartedModel

_build_logger = logging.getLogger("snapcap.build")
_weights_logger = logging.getLogger("snapcap.weights")


class _BackgroundWork:
    """Runs `work` on a new thread soon after READY, and can end it."""

    def __init__(self, work: Callable[["_BackgroundWork"], None]) -> None:
        self._stops: list[Callable[[], object]] = []
        self._stopped = threading.Event()
        self._timer = after_ready(partial(work, self))

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def keep(self, stop: Callable[[], object]) -> bool:
        """Adds a function that ends a part of the work. Returns False if the work was ended already."""
        self._stops.append(stop)
        return not self.stopped

    def stop(self) -> None:
        self._stopped.set()
        self._timer.cancel()
        for stop in self._stops:
            stop()


def start_build(
    options: "StartOptions", loaded: "StartedModel", status: "StartupStatus", engine: "Engine"
) -> Callable[[], object]:
    """Schedules a build if artifacts are missing, or if the store could not be read and must be asked again.
    Returns a function that ends the build."""
    if loaded.compiled or options.compute.backend not in ("auto", "aot"):
        return lambda: None
    if options.store.build == "off":
        found = loaded.artifacts
        if options.store.remote is None or found is None or found.fetched.result != "error":
            return lambda: None

    def on_device(function: Callable[[], None]) -> "Future[None]":
        return engine.call(function, "swap a bucket in")

    def begin(work: _BackgroundWork) -> None:
        try:
            from snapcap.warmup.start.background_build import BackgroundBuild  # noqa: PLC0415  only starts without artifacts need it

            build = BackgroundBuild(loaded, options, status, on_device)
        except Exception as error:  # no other thread would report it
            status.building(state="failed", error=f"{type(error).__name__}: {error}")
            _build_logger.exception("build failed unexpectedly; eager goes on serving")
            return
        if work.keep(build.stop):
            build.start()

    return _BackgroundWork(begin).stop


def start_preparing(options: "StartOptions", loaded: "StartedModel") -> Callable[[], object]:
    """Schedules the preparation of weights, in a process. Returns a function that ends it."""
    if loaded.weights in ("hit", "off"):
        return lambda: None

    def prepare(work: _BackgroundWork) -> None:
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
        if not work.stopped:
            level = logging.WARNING if prepared.result == "skipped" else logging.INFO
            fields = {"result": prepared.result, "reason": prepared.reason}
            _weights_logger.log(level, "weights for the next start", extra={"fields": fields})

    return _BackgroundWork(prepare).stop


def _is_writable(folder: Path) -> bool:
    """Returns whether files can be made in a folder, or, if it does not exist, in the nearest parent that does."""
    while not os.access(folder, os.F_OK):
        folder = folder.parent
    return os.access(folder, os.W_OK)
