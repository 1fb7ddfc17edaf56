"""Ends a start for the outside: READY, on a terminal with a picture of it, or FAILED with a sentence."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from snapcap.service.images.decoder import ImageDecoder
from snapcap.service.ipc.fork import settle
from snapcap.service.readiness import State
from snapcap.warmup.errors import one_line, unexpected
from snapcap.warmup.progress.timeline import Phase

if TYPE_CHECKING:
    from snapcap.service.api.app import Services
    from snapcap.service.config.settings import Settings
    from snapcap.service.engine.request import CaptionEngine
    from snapcap.warmup.plan.checkpoint import Checkpoint

_BAR = 48
_logger = logging.getLogger("snapcap.start")


class StartResult:
    """`stop` ends a server whose model cannot be served."""

    def __init__(self, settings: "Settings", services: "Services", stop: Callable[[], None]) -> None:
        self._settings = settings
        self._services = services
        self._stop = stop

    def log_phases(self) -> None:
        """Those that are over, and each one as it ends."""
        self._services.timeline.listen(_log_phase)

    def ready(
        self, engine: "CaptionEngine", checkpoint: "Checkpoint", image_decoder: ImageDecoder | None = None
    ) -> bool:
        """Captions are served from now on. False when a signal came first. `image_decoder` None: threads decode."""
        settings, services, timeline = self._settings, self._services, self._services.timeline
        name = settings.http.model_name or checkpoint.name
        services.captioner.attach(engine, checkpoint.transform, checkpoint.tokenizer, name, image_decoder)
        settle()
        if not services.readiness.ready():
            return False
        timeline.mark("ready")
        status = services.status.to_dict()
        served_by = {name: status[name] for name in ("tier", "device", "dtype")}
        _logger.info(
            "ready", extra={"fields": {"s": timeline.marks()["ready"], "model": checkpoint.name, **served_by}}
        )
        if settings.log.format == "text" and sys.stderr.isatty():
            print(waterfall(timeline.phases(), timeline.marks()["ready"]), file=sys.stderr)
        return True

    def failed(self, error: BaseException) -> None:
        """Say what was wrong, and end."""
        sentence = one_line(error)
        if self.told_failed(sentence):
            _logger.error("failed", extra={"fields": {"error": sentence}}, exc_info=unexpected(error))

    def told_failed(self, sentence: str) -> bool:
        """End, and let others log it. False when it has failed before, or is ending already."""
        readiness = self._services.readiness
        self._services.status.fail(sentence)
        failed = readiness.state is not State.FAILED and readiness.fail(sentence)
        self._stop()
        return failed


def _log_phase(phase: Phase) -> None:
    if phase.end is not None:
        fields = {"phase": phase.name, "start_s": phase.start, "s": phase.end - phase.start}
        _logger.info("phase", extra={"fields": fields})


def waterfall(phases: Sequence[Phase], total: float) -> str:
    """One line a phase: its bar on the scale of the whole start, when it began and how long it took.

    Args:
        phases: in the order in which they began; one that still runs ends with the picture.
        total: seconds from exec until ready; the right edge.
    """
    width = max((len(phase.name) for phase in phases), default=0)
    return "\n".join(_line(phase, total, width) for phase in phases)


def _line(phase: Phase, total: float, width: int) -> str:
    end = total if phase.end is None else min(phase.end, total)
    first = min(int(phase.start / total * _BAR), _BAR - 1)
    last = max(int(end / total * _BAR), first + 1)
    bar = " " * first + "█" * (last - first) + " " * (_BAR - last)
    return f"  {phase.name:<{width}} │{bar}│ {phase.start:6.3f} s  {1000 * (end - phase.start):7.1f} ms"
