"""Launches the process that fetches a published model at the beginning of a start, and ends it after the start.

The engine process imports this module first, so the module imports little.
"""

import atexit
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from snapcap.warmup.artifacts.store import MODELS
from snapcap.warmup.checkpoints.source import folder_at_hand, is_publishable
from snapcap.warmup.machine.worker import Worker
from snapcap.warmup.options import FetchJob, StartOptions

if TYPE_CHECKING:
    from snapcap.warmup.weights.published import ModelFetcher

_KEEPING_S = 5.0
_logger = logging.getLogger("snapcap.weights")


def may_be_published(options: StartOptions) -> bool:
    """Returns whether a start should look the model up in its store: this machine has no checkpoint, and the store
    may have the model. Sends no request."""
    model = options.model
    try:
        if not model.prepared_weights or not is_publishable(model.source):
            return False
        if folder_at_hand(model.source, model.cache_dir, options.s3) is not None:
            return False
        return options.store.remote is not None or any((options.store_folder / MODELS).glob("*.json"))
    except (OSError, ValueError):  # the source cannot be a file's name
        return False


def begin_fetcher(options: StartOptions) -> "ModelFetcher | None":
    """Launches the process of a fetcher of the published model and returns the fetcher. Returns None if this
    machine has the model or the store cannot have it."""
    try:
        if not may_be_published(options):
            return None
        # Imports of the new process take longer than a start needs to determine its model, so the process is
        # launched before this process imports the modules that determine it.
        worker = Worker("snapcap.warmup.artifacts.worker", FetchJob.of(options))
        worker.launch()
        from snapcap.warmup.weights.published import ModelFetcher  # noqa: PLC0415  while the process imports

        fetcher = ModelFetcher(options, worker)
        fetcher.begin()
    except Exception:
        _logger.exception("the store is not asked for weights")
        return None
    return fetcher


def close_behind(fetcher: "ModelFetcher | None", coming: Sequence["Future[Any]"]) -> None:
    """End the fetcher on a thread, once all futures are done and the weights are synced to the disk. A program that
    ends earlier waits a moment for this."""
    if fetcher is None:
        return

    def close() -> None:
        wait(coming)
        fetcher.close()

    thread = threading.Thread(target=close, name="snapcap-weights", daemon=True)
    thread.start()
    atexit.register(thread.join, _KEEPING_S)
