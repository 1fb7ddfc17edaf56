"""The start behind a bound port: begins when /livez answers, and ends READY or FAILED."""

import gc
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from service.config import Settings
from service.errors import EngineFailed
from service.waterfall import waterfall
from warmup.timeline import Phase

if TYPE_CHECKING:
    from service.app import Services
    from service.engine import Engine
    from service.scheduler import Scheduler
    from warmup.options import StartOptions
    from warmup.prepared import Checkpoint
    from warmup.startup import Loaded

_logger = logging.getLogger("snapcap.start")


def start(settings: Settings, services: "Services", stop: Callable[[], None]) -> Callable[[], object]:
    """Start the device thread and return what ends the work behind it, for when the server has ended.

    When the model cannot be served, say so and call ``stop``."""
    timeline, readiness = services.timeline, services.readiness
    exits = ExitStack()
    timeline.listen(_log_phase)

    def ready(options: "StartOptions", loaded: "Loaded", engine: "Engine", scheduler: "Scheduler") -> None:
        services.metrics.queue_depth.set_function(lambda: scheduler.depth)
        services.metrics.device_memory_allocated.set_function(loaded.runner.allocated_bytes)
        checkpoint = loaded.checkpoint
        name = settings.http.model_name or checkpoint.name
        services.captioner.attach(engine, checkpoint.transform, checkpoint.tokenizer, name)
        # `serve` has put collections off. What the imports made stays for good: later ones need not look at it.
        gc.freeze()
        gc.enable()
        if not readiness.ready():
            return  # a signal came first: draining
        timeline.mark("ready")
        services.status.started()
        if not loaded.compiled and options.backend in ("auto", "aot") and options.build != "off":
            from warmup.background import BackgroundBuild  # noqa: PLC0415  only a start without artifacts

            build = BackgroundBuild(loaded, options, services.status, engine.call)
            exits.callback(build.stop)
            build.start()
        _logger.info(
            "ready",
            extra={"fields": {"s": timeline.marks()["ready"], "model": checkpoint.name, **_served_by(services)}},
        )
        if settings.log.format == "text" and sys.stderr.isatty():
            print(waterfall(timeline.phases(), timeline.marks()["ready"]), file=sys.stderr)

    def failed(error: Exception) -> None:
        sentence = explain(error)
        services.status.fail(sentence)
        if readiness.fail(sentence):
            _logger.error("failed", extra={"fields": {"error": sentence}}, exc_info=unexpected(error))
        stop()

    def begin() -> None:
        try:
            from service.device_thread import DeviceThread  # noqa: PLC0415
            from service.start_options import start_options  # noqa: PLC0415

            options = start_options(settings)
            DeviceThread(
                options,
                timeline,
                services.status,
                services.metrics,
                settings.queue.size,
                partial(ready, options),
                failed,
                _rehearse,
            ).start()
        except Exception as error:
            failed(error)

    # On a thread already for what the start imports before torch: the event loop answers probes meanwhile.
    threading.Thread(target=begin, name="start", daemon=True).start()
    return exits.close


def _rehearse(engine: "Engine", checkpoint: "Checkpoint") -> None:
    from service.rehearsal import rehearse  # noqa: PLC0415  PIL, which has been imported by now

    rehearse(engine, checkpoint)


def explain(error: Exception) -> str:
    """One line for the log, /readyz and /startup."""
    if isinstance(error, EngineFailed):
        return "the device failed several times in a row; the log has the cause"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}" if unexpected(error) else text


def unexpected(error: Exception) -> Exception | None:
    """The error when it is not one that names its remedy itself: then the log must have its trace."""
    if isinstance(error, ImportError):
        return error  # the installation is broken, perhaps in one of these modules
    # Here: all of them are in modules that the start has imported by now.
    from models.checkpoint_file import WeightsError  # noqa: PLC0415
    from models.config import ConfigError  # noqa: PLC0415
    from warmup.build import BuildError  # noqa: PLC0415
    from warmup.checkpoint import CheckpointError  # noqa: PLC0415
    from warmup.plan import StartError  # noqa: PLC0415
    from warmup.store import StoreError  # noqa: PLC0415

    known = (CheckpointError, ConfigError, WeightsError, StartError, BuildError, StoreError)
    return None if isinstance(error, known) else error


def _served_by(services: "Services") -> dict[str, object]:
    status = services.status.to_dict()
    return {name: status[name] for name in ("tier", "device", "dtype")}


def _log_phase(phase: Phase) -> None:
    if phase.end is not None:
        fields = {"phase": phase.name, "start_s": phase.start, "s": phase.end - phase.start}
        _logger.info("phase", extra={"fields": fields})
