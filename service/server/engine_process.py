"""Runs the engine process for the HTTP process: the start, the device thread, and the work that follows READY.

    socket ─▶ this thread ─▶ scheduler ─▶ device thread ─▶ Turns ─▶ socket

The process ends when the HTTP process closes the socket.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass
from snapcap.service.config.settings import Settings
from snapcap.service.engine.remote.messages import (
    ArtifactsFound,
    Beat,
    Cancel,
    CheckpointFound,
    Failed,
    Message,
    ModelLoaded,
    Ready,
    Rehearsed,
    Submit,
    Usage,
)
from snapcap.service.engine.remote.server import BlockingChannel, EngineServer
from snapcap.service.ipc.fork import settle, trim_heap
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.service.readiness import BackgroundWork
from snapcap.service.watch import LoopWatch, print_stacks_on_signal
from snapcap.warmup.errors import one_line, unexpected
from snapcap.warmup.options import StartOptions
from snapcap.warmup.progress.status import StartupStatus, compiler_counts
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
    from snapcap.service.engine.engine import Engine
    from snapcap.warmup.start.start import StartedModel
    from snapcap.warmup.weights.published import ModelFetcher

_USAGE_S = 1.0
_logger = logging.getLogger("snapcap.start")
_build_logger = logging.getLogger("snapcap.build")
_weights_logger = logging.getLogger("snapcap.weights")


def serve_engine(
    settings: Settings,
    end: socket.socket,
    pixels: SharedPixels,
    origin: float,
    importing: float,
    fetcher: "ModelFetcher | None",
) -> int:
    """Serves requests until the socket is closed. `origin` is the moment of exec, the zero of the timeline;
    `importing` the second after it at which this process began to import; `fetcher` fetches the published model."""
    print_stacks_on_signal()
    process = _EngineProcess(settings, BlockingChannel(end), pixels, Timeline(origin), importing, fetcher)
    process.run()
    return 0


@dataclass(eq=False)
class _EngineProcess:
    settings: Settings
    channel: BlockingChannel
    pixels: SharedPixels
    timeline: Timeline
    importing: float
    fetcher: "ModelFetcher | None"

    def __post_init__(self) -> None:
        self._status = StartupStatus()
        self._server = EngineServer(self.pixels, self.channel.send)
        self._rehearsed = threading.Event()
        self._ended = threading.Event()
        self._loop_watch = LoopWatch(self.settings.watchdog.timeout, os.getppid())
        self._engine: Engine | None = None
        self._behind = ExitStack()  # ends the background work

    def run(self) -> None:
        self.timeline.listen(self.channel.send)
        self._status.listen(self.channel.send)
        self._begin()
        while (messages := self.channel.receive()) is not None:
            for message in messages:
                self._take(message)
        self._ended.set()
        self._loop_watch.stop()
        self._behind.close()

    def _begin(self) -> None:
        try:
            with self.timeline.phase("import_engine", self.importing):
                from snapcap.service.engine.device_thread import DeviceThread  # noqa: PLC0415  a failed import is logged
                from snapcap.warmup.start.preparation import Callbacks  # noqa: PLC0415  likewise
            DeviceThread(
                self.settings,
                self.timeline,
                self._status,
                self._server.turns.observe,
                self._ready,
                self._failed,
                self._rehearse,
                self._server.turns.end,
                self.fetcher,
                Callbacks(
                    lambda checkpoint: self.channel.send(CheckpointFound(checkpoint.folder)),
                    lambda found: self.channel.send(ArtifactsFound(found.image_library() if found else None)),
                ),
            ).start()
        except Exception as error:
            self._failed(error)

    def _take(self, message: Message) -> None:
        match message:
            case Submit():
                self._server.submit(message)
            case Cancel(number):
                self._server.cancel(number)
            case Beat():
                self._loop_watch.heard()
                if self._engine is not None:
                    self.channel.send(self._engine.pulse())
            case Rehearsed():
                self._rehearsed.set()

    def _rehearse(self, engine: "Engine", loaded: "StartedModel") -> None:
        """Serves a rehearsed request. The HTTP process sends it, as most of a request's code runs there."""
        self.pixels.open(loaded.checkpoint.config.vision.image_size)
        self._server.attach(engine)
        self.channel.send(ModelLoaded(engine.limits, loaded.rehearses))
        self._rehearsed.wait()

    def _ready(self, loaded: "StartedModel", engine: "Engine") -> None:
        self._server.attach(engine)
        settle()
        if not loaded.model.prepared and loaded.plan.dtype == "int8":
            trim_heap()  # most of it are the float32 weights that were converted
        self._status.started()
        usage = _usage(loaded)
        self.channel.send(usage)  # the counts of the start must arrive before `Ready`
        self._engine = engine
        self.channel.send(Ready())
        self._loop_watch.start()
        threading.Thread(target=self._report_usage, args=(loaded, usage), name="usage", daemon=True).start()
        self._behind.callback(start_build(self.settings, loaded, self._status, engine))
        self._behind.callback(start_preparing(self.settings, loaded))

    def _failed(self, error: Exception) -> None:
        sentence = one_line(error)
        self._status.fail(sentence)
        _logger.error("failed", extra={"fields": {"error": sentence}}, exc_info=unexpected(error))
        self.channel.send(Failed(sentence))

    def _report_usage(self, loaded: "StartedModel", last: Usage) -> None:
        while not self._ended.wait(_USAGE_S):
            usage = _usage(loaded)
            if usage != last:
                self.channel.send(usage)
                last = usage


def _usage(loaded: "StartedModel") -> Usage:
    return Usage(loaded.runner.device.allocated_bytes(), compiler_counts())


def start_build(
    options: StartOptions, loaded: "StartedModel", status: StartupStatus, engine: "Engine"
) -> Callable[[], object]:
    """Schedules a build if artifacts are missing, or if the store could not be read and must be asked again.
    Returns a function that ends the build."""
    if loaded.compiled or options.compute.backend not in ("auto", "aot"):
        return lambda: None
    if options.store.build == "off":
        found = loaded.artifacts
        if options.store.remote is None or found is None or found.fetched.result != "error":
            return lambda: None

    def begin(work: BackgroundWork) -> None:
        try:
            from snapcap.warmup.start.background_build import BackgroundBuild  # noqa: PLC0415  only starts without artifacts need it

            build = BackgroundBuild(loaded, options, status, partial(engine.call, doing="swap a bucket in"))
        except Exception as error:  # no other thread would report it
            status.building(state="failed", error=f"{type(error).__name__}: {error}")
            _build_logger.exception("build failed unexpectedly; eager goes on serving")
            return
        if work.keep(build.stop):
            build.start()

    return BackgroundWork(begin).end


def start_preparing(options: StartOptions, loaded: "StartedModel") -> Callable[[], object]:
    """Schedules the preparation of weights, in a process. Returns a function that ends it."""
    if loaded.weights in ("hit", "off"):
        return lambda: None

    def prepare(work: BackgroundWork) -> None:
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
        if not work.ended.is_set():
            level = logging.WARNING if prepared.result == "skipped" else logging.INFO
            fields = {"result": prepared.result, "reason": prepared.reason}
            _weights_logger.log(level, "weights for the next start", extra={"fields": fields})

    return BackgroundWork(prepare).end


def _is_writable(folder: Path) -> bool:
    """Returns whether files can be made in a folder, or, if it does not exist, in the nearest parent that does."""
    while not os.access(folder, os.F_OK):
        folder = folder.parent
    return os.access(folder, os.W_OK)
