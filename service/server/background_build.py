"""Starts the background build of a server that is ready but runs without compiled artifacts."""

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from snapcap.service.readiness import AFTER_READY_S, after_ready

if TYPE_CHECKING:
    from concurrent.futures import Future

    from snapcap.service.engine.engine import Engine
    from snapcap.warmup.options import StartOptions
    from snapcap.warmup.progress.status import StartupStatus
    from snapcap.warmup.start.background_build import BackgroundBuild
    from snapcap.warmup.start.start import StartedModel

_logger = logging.getLogger("snapcap.build")


def start_build(
    options: "StartOptions",
    loaded: "StartedModel",
    status: "StartupStatus",
    engine: "Engine",
    after_s: float = AFTER_READY_S,
) -> Callable[[], object]:
    """Schedules the build ``after_s`` seconds from now, if there is something to build. Returns a function that
    ends it."""
    if loaded.compiled or options.compute.backend not in ("auto", "aot") or options.store.build == "off":
        return lambda: None
    builds: list[BackgroundBuild] = []

    def on_device(function: Callable[[], None]) -> "Future[None]":
        return engine.call(function, "swap a bucket in")

    stopped = threading.Event()

    def begin() -> None:
        try:
            from snapcap.warmup.start.background_build import BackgroundBuild  # noqa: PLC0415  only starts without artifacts need it

            builds.append(BackgroundBuild(loaded, options, status, on_device))
        except Exception as error:  # no other thread would report it
            status.building(state="failed", error=f"{type(error).__name__}: {error}")
            _logger.exception("build failed unexpectedly; eager goes on serving")
            return
        if not stopped.is_set():
            builds[0].start()

    def stop() -> None:
        stopped.set()
        timer.cancel()
        for build in builds:
            build.stop()

    timer = after_ready(begin, after_s)
    return stop
