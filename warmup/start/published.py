"""Begins to fetch a published model before a start can say what of it, and ends that behind the start.

The engine process imports it before all else, and so it imports little.
"""

import atexit
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from snapcap.warmup.options import StartOptions
from snapcap.warmup.weights.key import may_be_published

if TYPE_CHECKING:
    from snapcap.warmup.weights.published import ModelFetcher

_KEEPING_S = 5.0
_logger = logging.getLogger("snapcap.weights")


def begin_fetcher(options: StartOptions) -> "ModelFetcher | None":
    """Returns the fetcher of a published model, whose process is being started, or None if this machine has the
    model or the store cannot have it."""
    try:
        if not may_be_published(options):
            return None
        from snapcap.warmup.artifacts.launch import fetch_worker  # noqa: PLC0415  no other start needs it

        worker = fetch_worker(options, model=True)
        worker.launch()
        from snapcap.warmup.weights.published import ModelFetcher  # noqa: PLC0415  while it imports

        fetcher = ModelFetcher(options, worker)
        fetcher.begin()
    except Exception:
        _logger.exception("the store is not asked for weights")
        return None
    return fetcher


def close_behind(fetcher: "ModelFetcher | None", coming: Sequence["Future[Any]"]) -> None:
    """End it when all has come and is on the disk. A program that ends sooner waits a moment for that."""
    if fetcher is None:
        return

    def close() -> None:
        wait(coming)
        fetcher.close()

    thread = threading.Thread(target=close, name="snapcap-weights", daemon=True)
    thread.start()
    atexit.register(thread.join, _KEEPING_S)
