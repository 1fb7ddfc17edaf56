"""Captions images in this process, with the engine, the artifacts and the artifact store of the server."""

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from snapcap.models.errors import UserError
from snapcap.models.processing.image_formats import ImageError
from snapcap.service.captioning.options import CaptionOptions, options_from_json
from snapcap.service.captioning.stop_sequences import CaptionText
from snapcap.service.config.reader import settings_of
from snapcap.service.engine.request import Completion, FinishReason
from snapcap.service.errors import EngineFailed, InvalidOption, NotReady, ServiceError
from snapcap.service.images.decode import decode_threads
from snapcap.service.offline.discovery import reason_of
from snapcap.service.offline.feed import Asked, Model, OfflineModel, images_ahead

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

Image: TypeAlias = "str | os.PathLike[str] | bytes | PilImage"

_PATIENCE_S = 5.0
_GROUPS = ("model", "compute", "images", "store", "s3")


class CaptionError(UserError):
    """Reports that an image gets no caption, or that an option is invalid. The message is one line."""


@dataclass(frozen=True)
class Caption:
    """Holds a caption. ``text`` begins with the prompt, if there was one. ``tokens``: the number of generated
    tokens. ``finish_reason``: ``stop`` at an end token, ``length`` at ``max_new_tokens``. ``backend``: the backend
    that ran the decoder. ``seconds``: from the decoded image to the last token."""

    text: str
    tokens: int
    finish_reason: FinishReason
    backend: str
    seconds: float

    def __str__(self) -> str:
        return self.text


class Captioner:
    """Captions images with a model that is warm when the constructor returns. Usable as a context manager, which
    closes it.

    All methods may be called from several threads; their images share batches. An image is the name of a file, the
    bytes of a file, or a Pillow image, in any format that the server reads. The caption options are the options of
    the HTTP API, with the same names: ``prompt``, ``max_new_tokens``, ``num_beams``, ``temperature``, ``seed``,
    ``timeout`` (in seconds, from the moment when the image is read) and the rest.

    A Captioner sets torch's number of threads and its precision of matrix products for the whole process: artifacts
    are compiled for one value of each.
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **options: Any) -> None:
        """Loads a model and warms it up, as `snapcap serve` does before it is ready.

        The artifacts come from the folder and the store that the server uses. Without artifacts the model runs
        eagerly. `snapcap build` builds artifacts; a Captioner compiles only with ``backend="jit"``.

        Args:
            model: a value of ``--model``: "demo", a folder, a hub id, or s3://bucket/prefix.
            options: options of the command line, with underscores, as in ``device="cuda"``, ``buckets=(1, 4, 16)``
                or ``store="s3://bucket/prefix"``. Environment variables are not read.

        Raises:
            SettingsError: an option is unknown or has a bad value.
            UserError: the model cannot be started; the text says why.
        """
        settings = settings_of({"model": os.fspath(model), **options}, _GROUPS)
        self._offline = OfflineModel(settings)
        started = self._offline.start()
        if started is None:
            raise self._offline.error or RuntimeError("the start failed")
        self._model: Model = started
        self._threads = decode_threads(settings.images.decode_threads)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="decode")
        # Pillow reads the pixels of an opened image on first use, and that is not thread-safe.
        self._pillow = threading.Lock()
        self._closed = False
        # A device thread that still runs native code at interpreter shutdown would crash the process.
        self._end = weakref.finalize(self, _end, self._offline, self._pool)

    @property
    def device(self) -> str:
        """Returns the device of the model: ``cpu`` or ``cuda:N``."""
        return self._model.device

    @property
    def backend(self) -> str:
        """Returns the backend that runs the model: ``aot``, ``jit``, ``eager``, or ``mixed``."""
        return self._model.backend

    def __call__(self, image: Image, **options: Any) -> Caption:
        """Returns the caption of one image.

        Raises:
            CaptionError: the image cannot be read, an option is invalid, the ``timeout`` has passed, or the engine
                has ended.
        """
        asked = self._asked(options)
        future: Future[Completion] = Future()
        try:
            self._begin(asked, image, future)
            return self._caption(asked, future)
        finally:
            future.cancel()  # after Ctrl-C nobody waits for the caption

    def batch(self, images: Iterable[Image], **options: Any) -> Iterator[Caption | CaptionError]:
        """Returns an iterator over the captions, in the order of ``images``. An image that fails yields its error,
        so that one bad file does not end a folder.

        The iterator reads ahead in ``images`` to keep the largest bucket full, and decodes images on threads.

        Raises:
            CaptionError: an option is invalid. The call itself raises it, before the first caption.
        """
        return self._in_order(images, self._asked(options))

    def stream(self, image: Image, **options: Any) -> Iterator[str]:
        """Returns an iterator over the text after the prompt, in pieces, while its tokens are generated. Generation
        starts with the first piece that is requested, and is cancelled when the iterator is closed.

        Raises:
            CaptionError: an option is invalid, or ``num_beams`` is above 1: a beam search has no token before its
                end. The call raises these errors; the iterator raises all others.
        """
        return self._pieces(self._asked(options, live=True), image)

    def close(self) -> None:
        """Ends the engine after all pending captions. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._end.detach()
            self._pool.shutdown()
            self._offline.close()

    def __enter__(self) -> "Captioner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, options: dict[str, Any], *, live: bool = False) -> Asked:
        if self._closed:
            raise _closed()
        try:
            checked = options_from_json(options, CaptionOptions())
            if live and checked.sampling.searches:
                raise InvalidOption("num_beams", "be 1 for a stream; a beam search has no token before its end")
            resolved = self._model.defaults.resolve(checked, self._model.engine.limits, live=live)
        except ServiceError as error:
            raise CaptionError(error.detail) from None
        return Asked(resolved, checked.timeout)

    def _begin(
        self,
        asked: Asked,
        image: Image,
        future: "Future[Completion]",
        tokens: "queue.SimpleQueue[int | None] | None" = None,
    ) -> None:
        """Decodes an image and submits it to the engine. An error becomes the exception of the future."""
        try:
            if not future.cancelled():
                began, on_token = time.monotonic(), None if tokens is None else tokens.put
                self._model.engine.submit(asked.request("", self._pixels(image), future, on_token, began))
        except Exception as error:
            with suppress(InvalidStateError):
                future.set_exception(error)

    def _pixels(self, image: Image) -> Any:
        transform = self._model.checkpoint.transform
        if isinstance(image, bytes):
            return transform.decode(image).pixels
        if isinstance(image, str | os.PathLike):
            return transform.decode(Path(image).read_bytes()).pixels
        if hasattr(image, "getexif"):
            with self._pillow:
                return transform.convert(image)
        raise CaptionError(
            f"{type(image).__name__} is no image; give the name of a file, its bytes or a Pillow image"
        )

    def _caption(self, asked: Asked, future: "Future[Completion]") -> Caption:
        try:
            done = future.result()
        except Exception as error:
            raise self._error(error) from error
        text = self._model.checkpoint.tokenizer.caption(asked.resolved.prompt_ids, done.tokens)
        seconds = done.queue_s + done.encode_s + done.decode_s
        return Caption(text, len(done.tokens), done.finish_reason, done.backend, seconds)

    def _error(self, error: Exception) -> CaptionError:
        if isinstance(error, CaptionError):
            return error
        if isinstance(error, NotReady) and self._closed:
            return _closed()
        if isinstance(error, NotReady) and (why := self._offline.ended()) is not None:
            return CaptionError(f"the engine has ended: {reason_of(why)}")
        if isinstance(error, EngineFailed):
            return CaptionError("the device failed; the log of snapcap.engine has the cause")
        if isinstance(error, OSError) and error.filename is not None:
            return CaptionError(f"{os.fsdecode(error.filename)}: {reason_of(error)}")
        known = isinstance(error, OSError | ImageError | ServiceError)
        return CaptionError(reason_of(error) if known else f"{type(error).__name__}: {reason_of(error)}")

    def _in_order(self, images: Iterable[Image], asked: Asked) -> Generator[Caption | CaptionError, None, None]:
        waiting: deque[Future[Completion]] = deque()
        ahead = images_ahead(self._model.largest // asked.resolved.params.num_beams or 1, self._threads)
        try:
            for image in images:
                if len(waiting) == ahead:
                    yield self._outcome(asked, waiting.popleft())
                waiting.append(self._later(asked, image))
            while waiting:
                yield self._outcome(asked, waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

    def _later(self, asked: Asked, image: Image) -> "Future[Completion]":
        future: Future[Completion] = Future()
        if self._closed:
            future.set_exception(_closed())
        elif hasattr(image, "getexif"):  # decoded now: the caller may close it when the next image is taken
            self._begin(asked, image, future)
        else:
            self._pool.submit(self._begin, asked, image, future)
        return future

    def _outcome(self, asked: Asked, future: "Future[Completion]") -> Caption | CaptionError:
        try:
            return self._caption(asked, future)
        except CaptionError as error:
            return error

    def _pieces(self, asked: Asked, image: Image) -> Generator[str, None, None]:
        future: Future[Completion] = Future()
        tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        future.add_done_callback(lambda _: tokens.put(None))
        tokenizer, prompt_ids = self._model.checkpoint.tokenizer, asked.resolved.prompt_ids
        text = tokenizer.stream(prompt_ids)
        shown = CaptionText(keep_leading_space=bool(prompt_ids) and not tokenizer.takes_instructions)
        try:
            self._begin(asked, image, future, tokens)
            for token in iter(tokens.get, None):
                if piece := shown.push(text.push(token)):
                    yield piece
            self._caption(asked, future)
            if piece := shown.push(text.end()) + shown.end():
                yield piece
        finally:
            future.cancel()


def _closed() -> CaptionError:
    return CaptionError("this Captioner is closed; make another")


def _end(offline: OfflineModel, pool: ThreadPoolExecutor) -> None:
    """Ends a Captioner that was never closed. Waits for the device thread for a limited time, as it may hang."""
    pool.shutdown(wait=False, cancel_futures=True)
    offline.close(_PATIENCE_S)
