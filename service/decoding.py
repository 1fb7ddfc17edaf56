"""The threads between the event loop and the device: they decode images and tokenise prompts."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from service.caption_options import CaptionOptions
from service.errors import Overloaded, UnprocessableImage
from service.metrics import Metrics
from warmup.cpus import available_cpus

if TYPE_CHECKING:
    from models.preprocess import DecodedImage, ImageTransform
    from models.tokenizer import Tokenizer
    from service.limits import Limits


@dataclass(frozen=True)
class Prepared:
    """What the device needs. `began` is a moment of `time.monotonic`, `decode_s` the seconds of the image."""

    image: "DecodedImage"
    prompt_ids: tuple[int, ...]
    began: float
    decode_s: float


def decode_threads(asked: int) -> int:
    """How many threads decode: as many as asked for, and where that is 0 one for each CPU, but no more than 8.

    Between two pieces of Pillow's work each needs Python's lock: with 16 threads on 16 CPUs the server captioned
    less than with 8 (``snapcap bench throughput --serve=--decode-threads=16``).
    """
    return asked or min(available_cpus(), 8)


class Decoding:
    """`queue_size`: images that may wait or be decoded at a time. `pool`: others' threads, which `close` leaves."""

    def __init__(
        self, threads: int, queue_size: int, metrics: Metrics, pool: ThreadPoolExecutor | None = None
    ) -> None:
        self.pool = pool or ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._queue_size = queue_size
        self._metrics = metrics
        self._lock = threading.Lock()
        self._count = 0

    def check_admission(self) -> None:
        """Raises Overloaded."""
        if self._count >= self._queue_size:
            raise Overloaded

    def start(
        self,
        image: bytes,
        options: CaptionOptions,
        model: tuple["ImageTransform", "Tokenizer", "Limits"],
        future: "Future[Any]",
        then: Callable[[Prepared], object],
    ) -> None:
        """Decode on a thread, and call `then` with it there. An error of either goes to the future; once that is
        cancelled, nothing more is done for it."""
        with self._lock:
            self._count += 1
        self.pool.submit(self._run, partial(self._prepare, image, options, *model), future, then)

    def close(self) -> None:
        """Ends the threads as they become free."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _run(
        self, prepare: Callable[[], Prepared], future: "Future[Any]", then: Callable[[Prepared], object]
    ) -> None:
        try:
            try:
                if future.cancelled():
                    return
                prepared = prepare()
            finally:
                with self._lock:
                    self._count -= 1
            then(prepared)
        except Exception as error:
            with suppress(InvalidStateError):  # the client has left
                future.set_exception(error)

    def _prepare(
        self,
        image: bytes,
        options: CaptionOptions,
        transform: "ImageTransform",
        tokenizer: "Tokenizer",
        limits: "Limits",
    ) -> Prepared:
        from models.image import ImageError  # noqa: PLC0415 - PIL and numpy, imported by now

        began = time.monotonic()
        try:
            decoded = transform.decode(image)
        except ImageError as error:
            self._metrics.image_decode_failures.labels(error.reason).inc()
            text = str(error)
            raise UnprocessableImage(f"{text[:1].upper()}{text[1:]}.", error.reason) from None
        seconds = time.monotonic() - began
        self._metrics.image_decoded(decoded.format, seconds)
        prompt_ids = tuple(tokenizer.encode(options.prompt)) if options.prompt else ()
        limits.check(len(prompt_ids), None if options.clamp else options.max_new_tokens, options.num_beams)
        return Prepared(decoded, prompt_ids, began, seconds)
