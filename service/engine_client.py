"""The engine process as the HTTP process follows it, from its fork to its end."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.process_collector import ProcessCollector

from service.config import Settings
from service.decoding import decode_threads
from service.engine_fork import ForkedEngine
from service.limits import Limits
from service.loop_channel import LoopChannel
from service.messages import (
    Failed,
    Found,
    Loaded,
    Message,
    PhaseSeen,
    Ready,
    Rehearsed,
    StatusSeen,
    Turn,
    Usage,
)
from service.outcome import Outcome
from service.remote_engine import RemoteEngine

if TYPE_CHECKING:
    from service.app import Services
    from warmup.prepared import Checkpoint

_END_S = 10.0
_logger = logging.getLogger("snapcap.start")


class EngineEndedError(RuntimeError):
    """The engine process has ended, though nobody told it to."""


def follow(
    process: ForkedEngine, settings: Settings, services: "Services", stop: Callable[[], None]
) -> Callable[[], object]:
    """Follow the engine process; called on the event loop. Returns what ends it, for when the server has ended.

    When the model cannot be served, say so and call ``stop``."""
    client = EngineClient(process, settings, services, stop, asyncio.get_running_loop())
    client.start()
    return client.close


class EngineClient:
    """Prepares what this process needs of the checkpoint, rehearses a request, and serves when the engine does."""

    def __init__(
        self,
        process: ForkedEngine,
        settings: Settings,
        services: "Services",
        stop: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._process = process
        self._settings = settings
        self._services = services
        self._outcome = Outcome(settings, services, stop)
        self._loop = loop
        self._channel = LoopChannel(process.end, loop, self._take)
        self._waiter = threading.Thread(target=self._wait, name="engine-process", daemon=True)
        self._folder: Future[Path] = Future()
        self._limits: Future[Limits] = Future()
        self._checkpoint: Checkpoint | None = None
        self._engine: RemoteEngine | None = None
        self._closing = False
        self._threads = decode_threads(settings.images.decode_threads)

    def start(self) -> None:
        services, pid = self._services, self._process.pid
        self._outcome.log_phases()
        ProcessCollector("snapcap_engine", lambda: pid, registry=services.registry)
        services.metrics.queue_depth.set_function(lambda: 0 if self._engine is None else self._engine.depth)
        self._waiter.start()
        threading.Thread(target=self._prepare, name="start", daemon=True).start()

    def close(self) -> None:
        """End the process, and wait until it has ended. The event loop is over by now."""
        self._closing = True
        self._channel.close()
        self._waiter.join(_END_S)
        if self._waiter.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
            self._waiter.join()

    def _prepare(self) -> None:
        """Beside the import of torch: read what turns bytes into pixels and tokens into text, and rehearse with it.
        Then, with the engine, rehearse a whole request."""
        try:
            # Pillow, numpy and tokenizers: now, as it takes a moment until the folder is known.
            from models.config import ModelConfig  # noqa: PLC0415
            from models.tokenizer import Tokenizer  # noqa: F401, PLC0415
            from service.rehearsal import Rehearsal  # noqa: PLC0415
            from warmup.prepared import Checkpoint  # noqa: PLC0415

            folder = self._folder.result()
            settings = self._settings
            config = ModelConfig.from_folder(folder)
            checkpoint = Checkpoint.of(settings.model.source, folder, config, settings.images.max_pixels)
            _ = checkpoint.tokenizer
            self._process.pixels.open(checkpoint.config.vision.image_size)
            with Rehearsal(checkpoint, self._services.captioner.pool) as rehearsal:
                self._rehearse(partial(rehearsal.without_engine, self._threads))
                engine = RemoteEngine(
                    self._limits.result(), self._process.pixels, self._channel.send, self._services.metrics
                )
                self._checkpoint, self._engine = checkpoint, engine
                self._rehearse(partial(rehearsal.ask, engine))
                self._channel.send(Rehearsed())
        except Exception as error:
            self._outcome.failed(error)

    def _rehearse(self, ask: Callable[[], None]) -> None:
        try:
            ask()
        except Exception:
            if not self._closing:  # else the threads are gone
                _logger.exception("the rehearsal of a request failed")

    def _take(self, message: Message) -> None:
        try:
            self._follow(message)
        except Exception as error:
            self._outcome.failed(error)

    def _follow(self, message: Message) -> None:
        services = self._services
        match message:
            case Turn() if self._engine is not None:
                self._engine.take(message)
            case PhaseSeen(phase):
                services.timeline.add(phase)
            case StatusSeen(state):
                services.status.restore(state)
            case Usage(device_bytes, compiler):
                services.metrics.device_memory_allocated.set(device_bytes)
                services.status.compiled_elsewhere(compiler)
            case Found(folder):
                self._folder.set_result(folder)
            case Loaded(limits):
                self._limits.set_result(limits)
            case Ready() if self._engine is not None and self._checkpoint is not None:
                self._outcome.ready(self._engine, self._checkpoint)
            case Failed(sentence):
                self._outcome.told_failed(sentence)

    def _wait(self) -> None:
        try:
            _, status = os.waitpid(self._process.pid, 0)
            how = _ending(os.waitstatus_to_exitcode(status))
        except ChildProcessError:
            how = "in a way that the system does not tell"
        if self._closing:
            return
        try:
            self._loop.call_soon_threadsafe(self._ended, how)
        except RuntimeError:  # the loop has been closed
            return

    def _ended(self, how: str) -> None:
        self._channel.receive()  # its last words
        if self._engine is not None:
            self._engine.fail()
        self._outcome.failed(EngineEndedError(f"the engine process ended {how}"))


def _ending(code: int) -> str:
    if code >= 0:
        return f"with status {code}; the log may have the cause"
    name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else str(-code)
    return f"by signal {name}; where that is SIGKILL, memory may have run out, as the system's log would say"
