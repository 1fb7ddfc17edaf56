"""Follows the engine process and the decode processes in the HTTP process, from their fork to their end."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.process_collector import ProcessCollector

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import UserError
from snapcap.service.config.settings import Settings
from snapcap.service.engine.remote.client import RemoteEngine
from snapcap.service.engine.remote.messages import (
    ArtifactsFound,
    Beat,
    CheckpointFound,
    Failed,
    Message,
    ModelLoaded,
    Pulse,
    Ready,
    Rehearsed,
    Turn,
    Usage,
)
from snapcap.service.images.pool import ImageRoom, ProcessImageDecoder
from snapcap.service.ipc.channel import LoopChannel
from snapcap.service.ipc.fork import how_it_ended, return_large_memory, trim_heap
from snapcap.service.ipc.shared_pixels import Slots
from snapcap.service.memory import decode_memory
from snapcap.service.readiness import State
from snapcap.service.server.processes import ServerProcesses
from snapcap.service.server.start_result import StartResult
from snapcap.service.watch import STACKS, EngineWatch, StalledError, Watchdog, end_on_signal, print_stacks_on_signal
from snapcap.warmup.progress.status import StatusState
from snapcap.warmup.progress.timeline import Phase

if TYPE_CHECKING:
    from snapcap.service.api.app import Services
    from snapcap.service.server.residency import Resident
    from snapcap.warmup.plan.checkpoint import Checkpoint

_LARGE_BODY = 1 << 20
_END_S = 10.0
_STACKS_S = 1.0  # seconds that a stuck engine process has to print its stacks
_logger = logging.getLogger("snapcap.start")


def follow(
    parts: ServerProcesses, settings: Settings, services: "Services", stop: Callable[[], None]
) -> Callable[[], object]:
    """Follows the other processes; called on the event loop. Returns a function that ends them, to call when the
    server has ended.

    If the model cannot be served, reports the reason and calls ``stop``."""
    result = StartResult(settings, services, stop)
    client = EngineClient(parts, settings, services, result, asyncio.get_running_loop())
    client.start()
    return client.close


@dataclass(eq=False)
class EngineClient:
    """Reads the checkpoint's processor and tokenizer for this process, rehearses a request, and serves when the
    engine does. `result` is told of the start's phases, of READY and of failures."""

    parts: ServerProcesses
    settings: Settings
    services: "Services"
    result: "StartResult | Resident"
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        parts, settings, services, loop = self.parts, self.settings, self.services, self.loop
        self._slots = Slots(parts.pixels.slots)
        self._channel: LoopChannel[Message] = LoopChannel(parts.engine.end, loop, self._take)
        self._image_decoder = ProcessImageDecoder(
            parts.images,
            parts.decoders,
            parts.pixels,
            self._slots,
            ImageRoom(decode_memory(settings), parts.decoders),
            settings.images.decode_timeout,
            services.metrics,
            loop,
            self.result.failed,
        )
        self._waiter = threading.Thread(target=self._wait, name="engine-process", daemon=True)
        self._preparing = threading.Thread(target=self._prepare, name="start", daemon=True)
        self._folder: Future[Path] = Future()
        self._image_library: Future[bytes | None] = Future()
        self._loaded: Future[ModelLoaded] = Future()
        self._checkpoint: Checkpoint | None = None
        self._engine: RemoteEngine | None = None
        self.device_bytes = 0  # bytes that the engine process has allocated on the device
        self._closing = False
        self._stalled = False
        self._start = Watchdog(settings.watchdog.start_timeout)
        self._watch = EngineWatch(settings.watchdog.timeout, self._beat, self._is_waiting, self._end_stalled)

    def start(self) -> None:
        services, pid = self.services, self.parts.engine.pid
        self.result.log_phases()
        ProcessCollector("snapcap_engine", lambda: pid, registry=services.registry)
        services.metrics.engine_progress_age.set_function(lambda: self._watch.silent_s)
        print_stacks_on_signal()
        self.loop.call_later(self._start.tick_s, self._tick_start)
        self._waiter.start()
        self._preparing.start()

    @property
    def pids(self) -> list[int]:
        """The ids of the engine process and of the decode processes."""
        return [self.parts.engine.pid, *self._image_decoder.family.pids]

    async def leave(self) -> None:
        """Ends the processes while the event loop goes on, and returns when they have ended and their memory is
        free. Requests that the model still has fail."""
        self._closing = True
        if self._engine is not None:
            self._engine.fail()
        self._channel.leave()
        self._image_decoder.leave()
        for each in (self._folder, self._image_library, self._loaded):
            each.cancel()  # `_prepare` may wait for them
        self.services.metrics.engine_progress_age.set_function(lambda: 0.0)
        self.services.metrics.device_memory_allocated.set(0)
        ended = self.loop.create_future()

        def end() -> None:
            try:
                self.close()
                self._preparing.join(_END_S)
                trim_heap()
            finally:
                with suppress(RuntimeError):  # the loop has been closed: the server ends
                    self.loop.call_soon_threadsafe(ended.set_result, None)

        threading.Thread(target=end, name="leave", daemon=True).start()
        await asyncio.shield(ended)
        self.parts.engine.end.close()
        if not self._preparing.is_alive():  # otherwise it may still use them
            self.parts.pixels.release()

    def close(self) -> None:
        """Ends the processes and waits until they have ended. Called when the event loop is over, or by `leave`."""
        self._closing = True
        self._channel.close()
        self._image_decoder.family.close()
        self._waiter.join(_STACKS_S if self._stalled else _END_S)
        self._signal(signal.SIGKILL)
        self._waiter.join(_END_S)  # a driver may hold up the engine process's end, but must not hold up this one's

    def _prepare(self) -> None:
        """Reads the processor and the tokenizer while the engine process imports torch, and rehearses requests
        without a model, one on each decode process. Then rehearses a request with the engine, whose image is
        decoded already."""
        try:
            # The tokenizer's library is imported before the folder is known, which takes a moment.
            from snapcap.models.processing.tokenizer import Tokenizer  # noqa: F401, PLC0415
            from snapcap.service.server.rehearsal import AnswersAtOnce, DecodedBefore, rehearse  # noqa: PLC0415
            from snapcap.warmup.plan.checkpoint import Checkpoint  # noqa: PLC0415

            folder = self._folder.result()
            settings = self.settings
            checkpoint = Checkpoint.of(settings, folder)
            _ = checkpoint.tokenizer
            self.parts.pixels.open(checkpoint.config.vision.image_size)
            if not self._image_decoder.begin(checkpoint.transform, self._image_library.result()):
                return
            alone = AnswersAtOnce(self._slots)
            self._rehearse(
                partial(rehearse, alone, checkpoint, self._image_decoder, self._run, self.parts.decoders)
            )
            if not self._image_decoder.works:
                self.loop.call_soon_threadsafe(self._image_decoder.family.give_up, "no process has answered")
                return
            limits, rehearses = self._loaded.result()
            self._checkpoint = checkpoint
            engine = self._engine = RemoteEngine(
                limits,
                self._slots,
                self._channel.send,
                self.services.metrics.worked,
                lambda: self._channel.has_room,
            )
            if self._closing:  # `leave` may have found no engine to fail
                engine.fail()
        except (Exception, CancelledError) as error:
            if not self._closing:
                self.result.failed(error)
            return
        if rehearses:
            self._rehearse(partial(rehearse, engine, checkpoint, DecodedBefore(self._slots), self._run))
        self._channel.send(Rehearsed())
        end_on_signal()
        return_large_memory(_LARGE_BODY)

    def _rehearse(self, rehearsal: Callable[[], None]) -> None:
        try:
            rehearsal()
        except Exception:
            # While the server ends, the decode processes are gone, and a failure is no news.
            if not self._closing and self.services.readiness.state is State.STARTING:
                _logger.exception("the rehearsal of a request failed")

    def _run(self, rehearsal: Coroutine[Any, Any, None]) -> None:
        """Runs a rehearsal on the event loop that serves, because the image decoder belongs to that loop."""
        asyncio.run_coroutine_threadsafe(rehearsal, self.loop).result()

    def _take(self, message: Message) -> None:
        try:
            self._follow(message)
        except Exception as error:
            self.result.failed(error)

    def _follow(self, message: Message) -> None:
        services = self.services
        match message:
            case Turn() if self._engine is not None:
                self._engine.take(message)
            case Pulse():
                self._watch.take(message)
            case Phase():
                services.timeline.add(message)
            case StatusState():
                services.status.restore(message)
            case Usage(device_bytes, compiler):
                self.device_bytes = device_bytes
                services.metrics.device_memory_allocated.set(device_bytes)
                services.status.compiled_elsewhere(compiler)
            case CheckpointFound(folder):
                self._folder.set_result(folder)
            case ArtifactsFound(image_library):
                self._image_library.set_result(image_library)
            case ModelLoaded():
                self._loaded.set_result(message)
            case Ready() if self._engine is not None and self._checkpoint is not None:
                # Only the captioner keeps the tokenizer, which may take 40 MB: the model's end must free it.
                checkpoint, self._checkpoint = self._checkpoint, None
                self.result.ready(self._engine, checkpoint, self._image_decoder)
                self._tick()
            case Failed(sentence):
                self.result.told_failed(sentence)

    def _beat(self) -> None:
        if self._channel.has_room:
            self._channel.send(Beat())

    def _is_waiting(self) -> bool:
        return self._engine is not None and self._engine.waiting

    def _tick_start(self) -> None:
        readiness = self.services.readiness
        if readiness.state is not State.STARTING or self._closing:
            return
        self.loop.call_later(self._start.tick_s, self._tick_start)
        if self._start.tick():
            sentence = f"the start has taken {self._start.silent_s:.0f} s, and is in phase {readiness.phase()}"
            self._end_stalled(StalledError(sentence))

    def _tick(self) -> None:
        if self._closing:
            return
        self.loop.call_later(self._watch.tick_s, self._tick)
        self._watch.look()

    def _end_stalled(self, error: StalledError) -> None:
        """Fails all requests, ends the server, and ends the engine process, which first logs its stacks."""
        self._stalled = True
        if self._engine is not None:
            self._engine.fail()
        self.result.failed(error)
        self._signal(STACKS)
        self.loop.call_later(_STACKS_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal to the engine process, unless it has ended and its id may belong to another process."""
        if self._waiter.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.parts.engine.pid, number)

    def _wait(self) -> None:
        try:
            _, status = os.waitpid(self.parts.engine.pid, 0)
            how = how_it_ended(os.waitstatus_to_exitcode(status))
        except ChildProcessError:
            how = "with an unknown status"
        if self._closing or self._stalled:
            return
        try:
            self.loop.call_soon_threadsafe(self._ended, how)
        except RuntimeError:  # the loop has been closed
            return

    def _ended(self, how: str) -> None:
        self._channel.receive()  # the last messages of the engine process
        if self._engine is not None:
            self._engine.fail()
        self.result.failed(UserError(f"the engine process ended {how}"))
