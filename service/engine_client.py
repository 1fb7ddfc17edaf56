"""The engine process as the HTTP process follows it, from its fork to its end, and the decode processes with it."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.process_collector import ProcessCollector

from service.child_process import how_it_ended
from service.config import Settings
from service.decoder import Decoder
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
from service.parts import Parts
from service.process_decoder import ProcessDecoder
from service.remote_engine import RemoteEngine
from service.shared_pixels import Slots
from service.thread_decoder import ThreadDecoder, decode_threads

if TYPE_CHECKING:
    from service.app import Services
    from warmup.prepared import Checkpoint

_END_S = 10.0
_logger = logging.getLogger("snapcap.start")


class EngineEndedError(RuntimeError):
    """The engine process has ended, though nobody told it to."""


def follow(
    parts: Parts, settings: Settings, services: "Services", stop: Callable[[], None]
) -> Callable[[], object]:
    """Follow the other processes; called on the event loop. Returns what ends them, for when the server has ended.

    When the model cannot be served, say so and call ``stop``."""
    client = EngineClient(parts, settings, services, stop, asyncio.get_running_loop())
    client.start()
    return client.close


class EngineClient:
    """Prepares what this process needs of the checkpoint, rehearses a request, and serves when the engine does."""

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        services: "Services",
        stop: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._process = parts.engine
        self._pixels = parts.pixels
        self._slots = Slots(parts.pixels.slots)
        self._settings = settings
        self._services = services
        self._outcome = Outcome(settings, services, stop)
        self._loop = loop
        self._channel = LoopChannel(parts.engine.end, loop, self._take)
        self._processes: ProcessDecoder | None = None
        if parts.decoding is not None:
            self._processes = ProcessDecoder(parts.decoding, self._slots, services.metrics, loop)
        self._waiter = threading.Thread(target=self._wait, name="engine-process", daemon=True)
        self._folder: Future[Path] = Future()
        self._limits: Future[Limits] = Future()
        self._checkpoint: Checkpoint | None = None
        self._engine: RemoteEngine | None = None
        self._decoder: Decoder | None = None
        self._closing = False
        threads = decode_threads(settings.images.decode_threads)
        self._decoders = threads if parts.decoding is None else parts.decoding.count

    def start(self) -> None:
        services, pid = self._services, self._process.pid
        self._outcome.log_phases()
        ProcessCollector("snapcap_engine", lambda: pid, registry=services.registry)
        services.metrics.queue_depth.set_function(lambda: 0 if self._engine is None else self._engine.depth)
        self._waiter.start()
        threading.Thread(target=self._prepare, name="start", daemon=True).start()

    def close(self) -> None:
        """End the processes, and wait until they have ended. The event loop is over by now."""
        self._closing = True
        self._channel.close()
        if self._processes is not None:
            self._processes.close()
        self._waiter.join(_END_S)
        if self._waiter.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
            self._waiter.join()

    def _prepare(self) -> None:
        """Beside the import of torch: read what turns bytes into pixels and tokens into text, and rehearse with it,
        on all that decode. Then, with the engine, rehearse a whole request."""
        try:
            # Tokenizers, and where threads decode numpy and Pillow: now, as it takes a moment until the folder is
            # known.
            if self._processes is None:
                import models.image  # noqa: F401, PLC0415
            from models.config import ModelConfig  # noqa: PLC0415
            from models.tokenizer import Tokenizer  # noqa: F401, PLC0415
            from service.rehearsal import AnswersAtOnce, rehearse  # noqa: PLC0415
            from warmup.prepared import Checkpoint  # noqa: PLC0415

            folder = self._folder.result()
            settings = self._settings
            config = ModelConfig.from_folder(folder)
            checkpoint = Checkpoint.of(settings.model.source, folder, config, settings.images.max_pixels)
            _ = checkpoint.tokenizer
            self._pixels.open(checkpoint.config.vision.image_size)
            self._decoder = self._begin_decoding(checkpoint)
            alone = AnswersAtOnce(self._slots)
            self._rehearse(partial(rehearse, alone, checkpoint, self._decoder, self._run, self._decoders))
            if self._processes is not None and not self._processes.works:
                self._loop.call_soon_threadsafe(self._processes.give_up, "none has answered")
            limits = self._limits.result()
            self._checkpoint = checkpoint
            engine = self._engine = RemoteEngine(
                limits, self._pixels, self._slots, settings.queue.size, self._channel.send, self._services.metrics
            )
        except Exception as error:
            self._outcome.failed(error)
            return
        self._rehearse(partial(rehearse, engine, checkpoint, self._decoder, self._run))
        self._channel.send(Rehearsed())

    def _rehearse(self, rehearsal: Callable[[], None]) -> None:
        try:
            rehearsal()
        except Exception:
            if not self._closing:  # else who decodes is gone
                _logger.exception("the rehearsal of a request failed")

    def _begin_decoding(self, checkpoint: "Checkpoint") -> Decoder:
        threads = ThreadDecoder(self._services.captioner.pool, checkpoint.transform)
        if self._processes is None:
            return threads
        if not self._processes.begin(checkpoint.transform, threads):
            import models.image  # noqa: F401, PLC0415  which may be why
        return self._processes

    def _run(self, rehearsal: Coroutine[Any, Any, None]) -> None:
        """On the event loop that serves: what decodes belongs to it."""
        asyncio.run_coroutine_threadsafe(rehearsal, self._loop).result()

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
                self._outcome.ready(self._engine, self._checkpoint, self._decoder)
            case Failed(sentence):
                self._outcome.told_failed(sentence)

    def _wait(self) -> None:
        try:
            _, status = os.waitpid(self._process.pid, 0)
            how = how_it_ended(os.waitstatus_to_exitcode(status))
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
