"""Runs an engine without a server: loads the model, feeds it from image paths, and yields the outcomes in order.

Threads read and decode a bounded number of images ahead of the engine.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image_formats import ImageError
from snapcap.service.captioning.model_defaults import ModelDefaults, Resolved
from snapcap.service.config.settings import Settings
from snapcap.service.engine.device_thread import DeviceThread
from snapcap.service.engine.engine import Engine
from snapcap.service.engine.request import CaptionRequest, Completion
from snapcap.service.errors import NotReady, ServiceError
from snapcap.service.images.decode import with_library
from snapcap.service.offline.discovery import reason_of
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.start.start import StartedModel

if TYPE_CHECKING:
    import numpy as np

    from snapcap.models.processing.transform import DecodedImage

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

_LAST_WORDS_S = 5.0
_logger = logging.getLogger("snapcap.caption")
_NEVER = float("inf")
_LOOK_EVERY_S = 0.03


@dataclass(frozen=True)
class Model:
    """Holds the parts of a warm model. ``backend``: the backend that runs the model."""

    checkpoint: Checkpoint
    engine: Engine
    plan: Plan
    backend: str
    defaults: ModelDefaults


class OfflineModel:
    """Starts a model and waits for it. ``error``: the exception of a failed start, or of an engine that failed."""

    def __init__(self, settings: Settings) -> None:
        self.error: Exception | None = None
        # No build follows the start, so a start without artifacts names the command that builds them.
        settings = replace(settings, store=replace(settings.store, build="off"))
        self._task = settings.model.task
        self._model: Model | None = None
        self._changed = threading.Event()
        self._abandoned = False
        self._status = StartupStatus()
        self._device = DeviceThread(
            settings, Timeline.since_exec(), self._status, lambda work: None, self._ready, self._failed
        )

    def start(self) -> Model:
        """Loads the model and returns it when it is warm. Raises the exception of a failed start. An interruption
        by Ctrl-C ends the engine, as nobody will close it."""
        try:
            self._device.start()
            self._changed.wait()
        except BaseException:
            self._abandoned = True  # set before the model is read; `_ready` does both in the opposite order
            if self._model is not None:
                self._model.engine.stop()
            raise
        if self._model is None:
            raise self.error or RuntimeError("the start failed")
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

    def _ready(self, loaded: StartedModel, engine: Engine) -> None:
        self._status.started()
        checkpoint, artifacts = loaded.checkpoint, loaded.artifacts
        library = None if artifacts is None else artifacts.image_library()
        checkpoint = replace(checkpoint, transform=with_library(checkpoint.transform, library))
        defaults = ModelDefaults(checkpoint.tokenizer, checkpoint.config, self._task)
        self._model = Model(checkpoint, engine, loaded.plan, self._status.state.tier or "", defaults)
        if self._abandoned:
            engine.stop()
        self._changed.set()

    def _failed(self, error: Exception) -> None:
        self.error = error
        self._changed.set()


@dataclass(frozen=True)
class FeedResult:
    """Holds the outcome of one image: a completion, or the reason why there is none. ``size``: (width, height) of
    the upright image."""

    index: int
    path: str
    completion: Completion | None = None
    reason: str = ""
    size: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Asked:
    """Holds the caption options that all images share, and the timeout of each request in seconds."""

    resolved: Resolved
    timeout: float | None

    def request(
        self,
        name: str,
        pixels: "Pixels",
        future: "Future[Completion]",
        on_token: Callable[[int], None] | None = None,
        began: float | None = None,
    ) -> CaptionRequest:
        """Returns the engine request for one image. `began`: the `time.monotonic` from which the timeout counts;
        None: now."""
        asked = self.resolved
        now = time.monotonic() if began is None else began
        deadline = now + self.timeout if self.timeout else _NEVER
        return CaptionRequest(
            name,
            pixels,
            asked.prompt_ids,
            asked.params,
            deadline,
            future,
            on_token,
            None,
            asked.text_ids,
            asked.ahead,
        )


def images_ahead(model: Model, threads: int, beams: int = 1) -> int:
    """Returns the maximum number of decoded images in memory: those that run, two batches that wait to be encoded,
    and one image for each decode thread. The second waiting batch keeps the device busy while an image takes long
    to decode."""
    running = model.plan.slots // beams or 1
    return running + 2 * min(running, model.plan.table.largest.size) + threads


@dataclass(eq=False)
class Feed:
    """Keeps an engine's queue filled.

    At most ``ahead`` images are in progress. An image is in progress from just before its decoding until `outcomes`
    takes its result. While a large image is decoded, the images after it are captioned: only their tokens wait.
    ``ahead`` should be at least twice the largest bucket: one batch runs while the next waits. The engine's queue
    has no bound of its own, so ``ahead`` bounds it."""

    engine: Engine
    decode: "Callable[[bytes], DecodedImage]"
    asked: Asked
    threads: int
    ahead: int

    def __post_init__(self) -> None:
        self._room = threading.Semaphore(self.ahead)
        self._indices = itertools.count()
        self._hurry = threading.Event()  # set while one decode thread is too slow for the engine
        self._hurry.set()
        self._under_way: dict[int, Future[Completion]] = {}
        self._stopped = False
        # A signal handler puts into this queue: SimpleQueue.put is reentrant, locks and conditions are not.
        self._outcomes: queue.SimpleQueue[FeedResult | None] = queue.SimpleQueue()

    def stop(self) -> None:
        """Makes `outcomes` end with the images that are done. May be called from any thread and from a signal
        handler."""
        self._stopped = True
        self._outcomes.put(None)

    def outcomes(self, paths: Sequence[str]) -> Generator[FeedResult, None, None]:
        """Yields the outcome of each image, in order. After `stop`, yields the outcomes that are done and ends. May
        be called once."""
        for number in range(min(self.threads, len(paths))):
            arguments = (paths, number > 0)
            threading.Thread(target=self._work, args=arguments, name=f"decode_{number}", daemon=True).start()
        try:
            yield from self._in_order(len(paths))
        finally:
            self._stopped = True
            for future in list(self._under_way.values()):
                future.cancel()
            # Threads end, but are not joined: one may hang in a read of a network folder.
            self._hurry.set()
            self._room.release()

    def _in_order(self, count: int) -> Iterator[FeedResult]:
        early: dict[int, FeedResult] = {}
        due = 0
        while due < count:
            if self._outcomes.empty() and count - due > self.ahead:
                # Outcomes are taken several at a time: each one taken wakes a decode thread. This thread and the
                # decode threads take Python's lock from the device thread, which needs it after each operation.
                time.sleep(_LOOK_EVERY_S)
            outcome = self._outcomes.get()
            if outcome is None:
                break
            # The device thread must not release the semaphore: it would wait for the semaphore's lock while a
            # decode thread that holds it waits for a CPU.
            self._room.release()
            self._under_way.pop(outcome.index, None)
            self._set_pace()
            early[outcome.index] = outcome
            while due in early:
                yield early.pop(due)
                due += 1
        else:
            return
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            if outcome is not None:
                early[outcome.index] = outcome
        yield from (early[index] for index in sorted(early))

    def _set_pace(self) -> None:
        """Lets all threads decode if the engine may run out of images. Otherwise only one thread decodes: the
        others would take CPUs and Python's lock from the device thread."""
        if self._stopped or len(self._under_way) < self.ahead * 2 // 3:
            self._hurry.set()
        else:
            self._hurry.clear()

    def _work(self, paths: Sequence[str], helps: bool) -> None:
        """Runs one decode thread. ``helps``: the thread works only while the engine may run out of images."""
        while True:
            if helps:
                self._hurry.wait()
            self._room.acquire()
            index = next(self._indices)
            if self._stopped or index >= len(paths):
                self._room.release()  # so that the next thread wakes and ends too
                return
            try:
                self._submit(index, paths[index])
            except NotReady:  # the engine has ended
                self.stop()
                return
            except Exception as error:
                self._outcomes.put(FeedResult(index, paths[index], reason=self._reason(paths[index], error)))

    def _submit(self, index: int, path: str) -> None:
        decoded = self.decode(Path(path).read_bytes())
        future: Future[Completion] = Future()
        future.add_done_callback(partial(self._done, index, path, decoded.size))
        self._under_way[index] = future
        self.engine.submit(self.asked.request(path, decoded.pixels, future))

    def _done(self, index: int, path: str, size: tuple[int, int], future: "Future[Completion]") -> None:
        """Passes on the outcome of one request. Runs on the device thread, so it takes no lock."""
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._outcomes.put(FeedResult(index, path, future.result(), size=size))
        else:
            self._outcomes.put(FeedResult(index, path, reason=self._reason(path, error)))

    def _reason(self, path: str, error: BaseException) -> str:
        """Returns the reason why an image has no caption. Logs an unexpected error: one image that makes a decoder
        fail in a new way must not end the run."""
        if isinstance(error, OSError | ImageError | ServiceError):
            return reason_of(error)
        _logger.error("image failed", extra={"fields": {"file": path}}, exc_info=error)
        return f"{type(error).__name__}: {reason_of(error)}"
