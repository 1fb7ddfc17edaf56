"""Reports the end of a start: READY, on a terminal with a picture of the start, or FAILED with a sentence."""

import hashlib
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.errors import WeightsError
from snapcap.models.weights.listing import weight_files
from snapcap.service.captioning.captioner import WeightFiles
from snapcap.service.config.settings import Settings
from snapcap.service.images.decode import ImageDecoder
from snapcap.service.ipc.fork import settle
from snapcap.warmup.errors import one_line, unexpected
from snapcap.warmup.progress.timeline import Phase

if TYPE_CHECKING:
    from snapcap.service.api.app import Services
    from snapcap.service.engine.request import CaptionEngine
    from snapcap.warmup.plan.checkpoint import Checkpoint

_QUIET_S = 3.0  # seconds after which a phase that still runs is named on a terminal
_logger = logging.getLogger("snapcap.start")


class StartResult:
    """Reports the phases and the end of a start. `stop` ends a server whose model cannot be served."""

    def __init__(self, settings: Settings, services: "Services", stop: Callable[[], None]) -> None:
        self._settings = settings
        self._services = services
        self._stop = stop
        self._pictured = settings.log.format == "text" and sys.stderr is not None and sys.stderr.isatty()

    def log_phases(self) -> None:
        """Logs each start phase when it ends. On a terminal, `ready` draws all phases as a picture, and before that
        only phases that take long are logged."""
        self._services.timeline.listen(_LongPhases() if self._pictured else _log_phase)

    def ready(self, engine: "CaptionEngine", checkpoint: "Checkpoint", image_decoder: ImageDecoder) -> None:
        """Serves captions from now on, unless a signal came first."""
        settings, services, timeline = self._settings, self._services, self._services.timeline
        attach(settings, services, engine, checkpoint, image_decoder)
        settle()
        if not services.readiness.ready():
            return
        timeline.mark("ready")
        status = services.status.to_dict()
        fields = {"s": timeline.marks()["ready"], "model": checkpoint.name}
        fields |= {name: status[name] for name in ("tier", "device", "dtype")}
        if self._pictured:
            from snapcap.service.telemetry.terminal import address, columns, waterfall  # noqa: PLC0415 - servers have none

            print(waterfall(timeline.phases(), timeline.marks()["ready"], columns()), file=sys.stderr)
            fields["open"] = address(settings.http.host, settings.http.port)
        _logger.info("ready", extra={"fields": fields})

    def failed(self, error: BaseException) -> None:
        """Reports the error and ends the server."""
        sentence = one_line(error)
        if self.told_failed(sentence):
            _logger.error("failed", extra={"fields": {"error": sentence}}, exc_info=unexpected(error))

    def told_failed(self, sentence: str) -> bool:
        """Ends the server without a log line. Returns False if it had failed before, or is ending already."""
        self._services.status.fail(sentence)
        failed = self._services.readiness.fail(sentence)
        self._stop()
        return failed


def attach(
    settings: Settings,
    services: "Services",
    engine: "CaptionEngine",
    checkpoint: "Checkpoint",
    image_decoder: ImageDecoder,
) -> None:
    """Gives the captioner a model that is loaded."""
    from snapcap.service.captioning.model_defaults import ModelDefaults  # noqa: PLC0415 - after /livez answers
    from snapcap.service.captioning.prompts import PromptReader  # noqa: PLC0415 - likewise

    name = settings.http.model_name or checkpoint.name
    defaults = ModelDefaults(checkpoint.tokenizer, checkpoint.config, settings.model.task)
    prompts = PromptReader(checkpoint.folder, checkpoint.config.chat)
    services.captioner.attach(engine, name, image_decoder, defaults, prompts)
    services.captioner.files = weights_on_disk(checkpoint.folder)


def weights_on_disk(folder: Path) -> WeightFiles:
    """Describes the files of a checkpoint folder that hold the weights."""
    try:
        found = [(file.name, file.stat()) for file in weight_files(folder)]
    except (WeightsError, OSError):
        return WeightFiles()
    described = "".join(f"{name} {status.st_size} {status.st_mtime_ns}\n" for name, status in found)
    return WeightFiles(sum(status.st_size for _, status in found), hashlib.sha256(described.encode()).hexdigest())


def _log_phase(phase: Phase) -> None:
    if phase.end is not None:
        fields = {"phase": phase.name, "start_s": phase.start, "s": phase.end - phase.start}
        _logger.info("phase", extra={"fields": fields})


class _LongPhases:
    """Logs the name of a phase once, when it has run for `_QUIET_S` seconds."""

    def __init__(self) -> None:
        self._timers: dict[str, threading.Timer] = {}

    def __call__(self, phase: Phase) -> None:
        timer = self._timers.pop(phase.name, None)
        if timer is not None:
            timer.cancel()
        if phase.end is None:
            fields = {"phase": phase.name}
            timer = threading.Timer(_QUIET_S, _logger.info, ("starting",), {"extra": {"fields": fields}})
            timer.daemon = True
            timer.start()
            self._timers[phase.name] = timer
