"""Loads a model and runs its device thread without a server."""

import threading

from snapcap.models.dataclass import dataclass
from snapcap.service.captioning.model_defaults import ModelDefaults
from snapcap.service.config.settings import Settings
from snapcap.service.engine.device_thread import DeviceThread
from snapcap.service.engine.engine import Engine, NoObserver
from snapcap.service.engine.scheduler import Scheduler
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.start.start import StartedModel

_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class Model:
    """Holds the parts of a warm model. ``largest``: the maximum number of rows in a batch. ``backend``: the backend
    that runs the model."""

    checkpoint: Checkpoint
    engine: Engine
    largest: int
    device: str
    backend: str
    defaults: ModelDefaults


class OfflineModel:
    """Starts a model and waits for it. ``error`` is the exception of a failed start, or of an engine that failed
    later."""

    def __init__(self, settings: Settings) -> None:
        self.error: Exception | None = None
        self._task = settings.model.task
        self._model: Model | None = None
        self._changed = threading.Event()
        self._status = StartupStatus()
        self._device = DeviceThread(
            settings,
            Timeline.since_exec(),
            self._status,
            NoObserver(),
            self._ready,
            self._failed,
        )

    def start(self) -> Model | None:
        """Loads the model and returns it when it is warm. Returns None if the start failed."""
        self._device.start()
        self._changed.wait()
        return self._model

    def close(self, patience: float | None = None) -> None:
        """Ends the device thread once no request is left. Waits for its end for at most ``patience`` seconds; None:
        without a limit."""
        if self._model is not None:
            self._model.engine.stop()
        self._device.join(patience)

    def ended(self) -> Exception | None:
        """Returns the error that ended the engine, or None if it was stopped. Waits up to five seconds for the
        device thread, which first fails the waiting requests."""
        self._device.join(_LAST_WORDS_S)
        return self.error

    def _ready(self, loaded: StartedModel, engine: Engine, _scheduler: Scheduler) -> None:
        self._status.started()
        checkpoint, plan = loaded.checkpoint, loaded.plan
        defaults = ModelDefaults(checkpoint.tokenizer, checkpoint.config, self._task)
        self._model = Model(
            checkpoint, engine, plan.table.largest.size, plan.device, self._status.tier or "", defaults
        )
        self._changed.set()

    def _failed(self, error: Exception) -> None:
        self.error = error
        self._changed.set()
