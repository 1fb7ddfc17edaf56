"""Feeds an engine from image paths and yields the outcomes in order.

Threads read and decode ahead of the engine, as far as memory allows.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image_error import ImageError
from snapcap.service.captioning.model_defaults import Resolved
from snapcap.service.engine.engine import Engine
from snapcap.service.engine.request import CaptionRequest, Completion
from snapcap.service.errors import NotReady, ServiceError
from snapcap.service.offline.failure import reason_of

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

_logger = logging.getLogger("snapcap.caption")
_NEVER = float("inf")
_LOOK_EVERY_S = 0.03


@dataclass(frozen=True)
class FeedResult:
    """Holds the outcome of one image: a completion, or the reason why there is none."""

    index: int
    path: str
    completion: Completion | None = None
    reason: str = ""


@dataclass(frozen=True)
class Asked:
    """Holds the request for every image, and its timeout in seconds."""

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
        """`began`: the moment of `time.monotonic` from which the timeout counts; None: now."""
        asked = self.resolved
        now = time.monotonic() if began is None else began
        deadline = now + self.timeout if self.timeout else _NEVER
        return CaptionRequest(
            name, pixels, asked.prompt_ids, asked.params, deadline, future, on_token, text_ids=asked.text_ids
        )


class Feed:
    """Keeps an engine's queue filled.

    An image is counted from just before it is decoded until its outcome is looked at, and of these there are
    ``ahead`` at most. While one large image is decoded, those after it go on and wait for it as tokens only.
    """

    def __init__(
        self, engine: Engine, decode: Callable[[bytes], "Pixels"], asked: Asked, threads: int, ahead: int
    ) -> None:
        """``ahead`` should be the largest bucket, which runs, and as much again, which waits: the engine's queue
        has no bound of its own, and who fills it waits here instead of being refused."""
        self._engine = engine
        self._decode = decode
        self._asked = asked
        self._threads = threads
        self._ahead = ahead
        self._room = threading.Semaphore(ahead)
        self._lock = threading.Lock()
        self._next = 0
        self._hurry = threading.Event()  # the first decode thread does not keep up
        self._hurry.set()
        self._under_way: dict[int, Future[Completion]] = {}
        self._stopped = False
        # May be put into from a signal handler: SimpleQueue is reentrant, locks and conditions are not.
        self._outcomes: queue.SimpleQueue[FeedResult | None] = queue.SimpleQueue()

    def stop(self) -> None:
        """Let `outcomes` end with what is done. From any thread, and from a signal handler."""
        self._stopped = True
        self._outcomes.put(None)

    def outcomes(self, paths: Sequence[str]) -> Generator[FeedResult, None, None]:
        """The outcome of each image, in order; after `stop` those that are there by then, in order. Called once."""
        for number in range(min(self._threads, len(paths))):
            arguments = (paths, number > 0)
            threading.Thread(target=self._work, args=arguments, name=f"decode_{number}", daemon=True).start()
        try:
            yield from self._in_order(len(paths))
        finally:
            self._end()

    def _in_order(self, count: int) -> Iterator[FeedResult]:
        early: dict[int, FeedResult] = {}
        due = 0
        while due < count:
            if self._outcomes.empty() and count - due > self._ahead:
                # Several at a time: each look wakes the decode threads, and they and this one take Python's lock
                # from the device thread, which wants it back after every operation.
                time.sleep(_LOOK_EVERY_S)
            outcome = self._outcomes.get()
            if outcome is None:
                break
            # Here and not on the device thread: a lock that a decode thread holds would keep the device waiting
            # for as long as that thread waits for a CPU.
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
        """Lets all threads decode if the engine may run out of images. Otherwise one thread is enough, and the
        others would take CPUs and Python's lock from the device thread."""
        if self._stopped or len(self._under_way) < self._ahead * 2 // 3:
            self._hurry.set()
        else:
            self._hurry.clear()

    def _work(self, paths: Sequence[str], helps: bool) -> None:
        """Runs one decode thread. ``helps``: the thread works only while the engine may run out of images."""
        while True:
            if helps:
                self._hurry.wait()
            self._room.acquire()
            with self._lock:
                index = self._next
                self._next += 1
            if self._stopped or index >= len(paths):
                self._room.release()  # for the next thread, which waits to end
                return
            try:
                self._submit(index, paths[index])
            except NotReady:  # the engine has ended
                self.stop()
                return
            except Exception as error:
                self._outcomes.put(FeedResult(index, paths[index], reason=self._reason(paths[index], error)))

    def _submit(self, index: int, path: str) -> None:
        pixels = self._decode(Path(path).read_bytes())
        future: Future[Completion] = Future()
        future.add_done_callback(partial(self._done, index, path))
        self._under_way[index] = future
        self._engine.submit(self._asked.request(path, pixels, future))

    def _done(self, index: int, path: str, future: "Future[Completion]") -> None:
        """On the device thread, which takes no lock here."""
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._outcomes.put(FeedResult(index, path, future.result()))
        else:
            self._outcomes.put(FeedResult(index, path, reason=self._reason(path, error)))

    def _reason(self, path: str, error: BaseException) -> str:
        """In a folder of a million there is one that trips a decoder in a new way; it must not end the run."""
        if isinstance(error, OSError | ImageError | ServiceError):
            return reason_of(error)
        _logger.error("image failed", extra={"fields": {"file": path}}, exc_info=error)
        return f"{type(error).__name__}: {reason_of(error)}"

    def _end(self) -> None:
        """Withdraw what is under way. Nothing waits for the threads: one may hang in a read of a network folder."""
        self._stopped = True
        for future in list(self._under_way.values()):
            future.cancel()
        self._hurry.set()
        self._room.release()
