"""Starts the model within the HTTP process, as a replica of Ray Serve does, and ends READY or FAILED."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from snapcap.service.config.settings import Settings
from snapcap.service.images.decode import ThreadImageDecoder, with_image_library
from snapcap.service.server.background import start_build, start_preparing
from snapcap.service.server.start_result import StartResult
from snapcap.service.watch import EngineWatch

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from snapcap.service.api.app import Services
    from snapcap.service.engine.engine import Engine
    from snapcap.service.engine.scheduler import Scheduler
    from snapcap.warmup.start.start import StartedModel


def start(settings: Settings, services: "Services", stop: Callable[[], None]) -> Callable[[], object]:
    """Starts the device thread. Returns a function that ends its background work, to call when the server has
    ended.

    If the model cannot be served, reports the reason and calls ``stop``."""
    result, exits = StartResult(settings, services, stop), ExitStack()
    result.log_phases()

    def ready(loaded: "StartedModel", engine: "Engine", scheduler: "Scheduler") -> None:
        services.metrics.device_memory_allocated.set_function(loaded.runner.device.allocated_bytes)
        services.status.started()
        if result.ready(engine, with_image_library(loaded)):
            exits.callback(start_build(settings, loaded, services.status, engine))
            exits.callback(start_preparing(settings, loaded))
            exits.callback(_watch(settings, services, engine, scheduler, result))

    def begin() -> None:
        try:
            from snapcap.service.engine.device_thread import DeviceThread  # noqa: PLC0415

            DeviceThread(
                settings,
                services.timeline,
                services.status,
                services.metrics,
                ready,
                result.failed,
                partial(_rehearse, services.captioner.pool),
            ).start()
        except Exception as error:
            result.failed(error)

    # A thread does the imports too, so that clients are answered meanwhile.
    threading.Thread(target=begin, name="start", daemon=True).start()
    return exits.close


def _watch(
    settings: Settings, services: "Services", engine: "Engine", scheduler: "Scheduler", result: StartResult
) -> Callable[[], object]:
    """Fails the server when the device thread makes no progress. Returns a function that ends the watch.

    A process that does not run at all is noticed by Ray, which checks the health of each replica."""
    ended = threading.Event()
    watch = EngineWatch(
        settings.watchdog.timeout,
        lambda: watch.take(engine.pulse()),
        lambda: bool(scheduler.running or scheduler.depth),
        result.failed,
    )
    services.metrics.engine_progress_age.set_function(lambda: watch.silent_s)

    def tick() -> None:
        while not ended.wait(watch.tick_s):
            watch.tick()

    threading.Thread(target=tick, name="engine-watch", daemon=True).start()
    return ended.set


def _rehearse(pool: "Executor", engine: "Engine", loaded: "StartedModel") -> None:
    from snapcap.service.server.rehearsal import rehearse  # noqa: PLC0415

    if not loaded.slow:
        rehearse(engine, loaded.checkpoint, ThreadImageDecoder(pool, loaded.checkpoint.transform))
