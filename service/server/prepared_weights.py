"""Prepares the weights for later starts, in a server that is ready and whose start had to convert a checkpoint."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.service.readiness import AFTER_READY_S, after_ready

if TYPE_CHECKING:
    from snapcap.warmup.machine.worker import Worker
    from snapcap.warmup.options import StartOptions
    from snapcap.warmup.start.start import StartedModel

_LOWEST_PRIORITY = 19
_logger = logging.getLogger("snapcap.weights")


def start_preparing(
    options: "StartOptions", loaded: "StartedModel", after_s: float = AFTER_READY_S
) -> Callable[[], object]:
    """Schedules the preparation ``after_s`` seconds from now, in a process of its own. Returns a function that ends
    it."""
    if loaded.weights in ("hit", "off"):
        return lambda: None
    workers: list[Worker] = []
    stopped = threading.Event()

    def prepare() -> None:
        try:
            from snapcap.warmup.store.store import WEIGHTS  # noqa: PLC0415  starts do without it
            from snapcap.warmup.weights.worker import prepare_in_worker, weights_worker  # noqa: PLC0415  starts do without it

            if not _is_writable(options.store_folder / WEIGHTS):
                _logger.info("weights are not prepared: the artifact folder is read-only")
                return
            workers.append(weights_worker(loaded.checkpoint.folder, loaded.plan, options, _LOWEST_PRIORITY))
            if stopped.is_set():
                return
            prepared = prepare_in_worker(workers[0], thorough=loaded.weights == "corrupt")
        except Exception:  # no other thread would report it
            _logger.exception("weights could not be prepared; the next start reads the checkpoint again")
            return
        if not stopped.is_set():
            level = logging.WARNING if prepared.result == "skipped" else logging.INFO
            fields = {"result": prepared.result, "reason": prepared.reason}
            _logger.log(level, "weights for the next start", extra={"fields": fields})

    def stop() -> None:
        stopped.set()
        timer.cancel()
        for worker in workers:
            worker.stop()

    timer = after_ready(prepare, after_s)
    return stop


def _is_writable(folder: Path) -> bool:
    """Returns whether files can be made in a folder, or, if it does not exist, in the nearest parent that does."""
    while not os.access(folder, os.F_OK):
        folder = folder.parent
    return os.access(folder, os.W_OK)
