"""Captions images in this process, with the engine, the artifacts and the artifact store of the server."""

import io
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
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, Unpack

from snapcap.models.errors import UserError
from snapcap.models.processing.image_formats import ImageError
from snapcap.models.text import Region
from snapcap.service.captioning.options import CaptionOptions, OptionValues, options_from_json
from snapcap.service.config.reader import settings_of
from snapcap.service.engine.request import Completion, FinishReason
from snapcap.service.errors import EngineFailed, InvalidOption, NotReady, ServiceError
from snapcap.service.images.decode import decode_threads
from snapcap.service.offline.discovery import reason_of
from snapcap.service.offline.feed import Asked, Model, OfflineModel, images_ahead

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image as PilImage

_File: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | io.BytesIO  # its name or content
Image: TypeAlias = "_File | PilImage | NDArray[np.uint8]"

_PATIENCE_S = 5.0
_GROUPS = ("model", "compute", "images", "store", "s3")


class CaptionError(UserError):
    """Reports that an image gets no caption, or that an option is invalid. The message is one line."""


@dataclass(frozen=True)
class Caption:
    """Holds a caption. ``text`` begins with the prompt, if there was one. ``tokens``: the number of generated
    tokens. ``finish_reason``: ``stop`` at an end token, ``length`` at ``max_new_tokens``. ``backend``: the backend
    that ran the decoder. ``seconds``: from the decoded image to the last token. ``regions``: the parts of the image
    that the answers of some tasks name, each with ``label``, ``box`` and ``polygons`` in pixels of the image as its
    EXIF orientation turns it; None for other tasks."""

    text: str
    tokens: int
    finish_reason: FinishReason
    backend: str
    seconds: float
    regions: tuple[Region, ...] | None = None

    def __str__(self) -> str:
        return self.text


# Errors whose message needs no traceback to be understood.
_SAYS_ALL = (OSError, ImageError, ServiceError, CaptionError)


class _Pending(Future[Completion]):
    """Waits for a completion. ``size``: (width, height) of the upright image, once it is decoded."""

    size = (0, 0)


class Captioner:
    """A loaded, warmed-up model; use it in a ``with`` block, which closes it.

        with Captioner("demo") as captioner:
            print(captioner("photo.jpg"))
            for caption in captioner.batch(["a.jpg", "b.jpg"], num_beams=4):
                print(caption)

    An image is

    - the name of a file, as text or ``Path``;
    - the content of a file, as ``bytes``, ``bytearray``, ``memoryview`` or ``BytesIO``, in any format that the
      server reads;
    - a Pillow image;
    - a numpy array of RGB pixels: uint8, height × width × 3.

    The options of a caption are those of the HTTP API: ``prompt``, ``task``, ``task_text``, ``max_new_tokens``,
    ``min_new_tokens``, ``min_length``, ``temperature``, ``top_k``, ``top_p``, ``seed``, ``num_beams``,
    ``length_penalty``, ``early_stopping``, ``no_repeat_ngram_size``, ``repetition_penalty``, ``max_chars``,
    ``trim_lead``, and ``timeout``, in seconds from the moment when the image is read.

    All methods may be called from several threads; their images share batches. A process that is forked needs a
    Captioner of its own. A Captioner sets torch's number of threads and its precision of matrix products for the
    whole process: artifacts are compiled for one value of each."""

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
        self._model: Model = self._offline.start()
        self._threads = decode_threads(settings.images.decode_threads)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="decode")
        # Pillow reads the pixels of an opened image on first use, and that is not thread-safe.
        self._pillow = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        # A device thread that still runs native code at interpreter shutdown would crash the process.
        self._end = weakref.finalize(self, _end, self._offline, self._pool, self._process)

    @property
    def device(self) -> str:
        """Returns the device of the model: ``cpu`` or ``cuda:N``."""
        return self._model.plan.device

    @property
    def backend(self) -> str:
        """Returns the backend that runs the model: ``aot``, ``jit``, ``eager``, or ``mixed``."""
        return self._model.backend

    def __repr__(self) -> str:
        name = self._model.checkpoint.name
        if self._closed:
            return f"<Captioner {name}, closed>"
        return f"<Captioner {name} on {self.device}, {self.backend}, batches of at most {self._model.plan.slots}>"

    def __call__(self, image: Image, **options: Unpack[OptionValues]) -> Caption:
        """Returns the caption of one image.

            caption = captioner("photo.jpg", num_beams=4)
            caption.text, caption.tokens, caption.finish_reason, caption.backend, caption.seconds

        Raises:
            CaptionError: the image cannot be read, an option is invalid, the ``timeout`` has passed, or the engine
                has ended.
        """
        asked = self._asked(options)
        future = _Pending()
        try:
            self._begin(asked, image, future)
            return self._caption(asked, future)
        finally:
            future.cancel()  # after Ctrl-C nobody waits for the caption

    def batch(self, images: Iterable[Image], **options: Unpack[OptionValues]) -> Iterator[Caption | CaptionError]:
        """Returns an iterator over the captions, in the order of ``images``. An image that fails yields its error,
        so that one bad file does not end a folder.

            for path, caption in zip(paths, captioner.batch(paths)):
                if isinstance(caption, CaptionError):
                    print(path, "failed:", caption)

        The iterator reads ahead in ``images`` to keep the largest bucket full, and decodes images on threads. An
        image may be changed when the next one is taken.

        Raises:
            CaptionError: ``images`` is one image, or an option is invalid. The call itself raises it, before the
                first caption.
        """
        if _is_one_image(images) or not isinstance(images, Iterable):
            raise CaptionError(
                f"batch takes a list or another iterable of images, not one {type(images).__name__}; call the "
                "Captioner itself for one image"
            )
        return self._in_order(images, self._asked(options))

    def stream(self, image: Image, **options: Unpack[OptionValues]) -> Iterator[str]:
        """Returns an iterator over the text after the prompt, in pieces, while its tokens are generated. Generation
        starts with the first piece that is requested, and is cancelled when the iterator is closed.

            for piece in captioner.stream("photo.jpg"):
                print(piece, end="", flush=True)

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
            if os.getpid() == self._process:
                self._pool.shutdown()
                self._offline.close()

    def __enter__(self) -> "Captioner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _asked(self, options: OptionValues, *, live: bool = False) -> Asked:
        if self._closed:
            raise _closed()
        self._check_process()
        try:
            checked = options_from_json(options, CaptionOptions())
            if live and checked.sampling.searches:
                raise InvalidOption("num_beams", "be 1 for a stream; a beam search has no token before its end")
            resolved = self._model.defaults.resolve(checked, self._model.engine.limits, live=live)
        except ServiceError as error:
            raise CaptionError(error.detail) from None
        return Asked(resolved, checked.timeout)

    def _check_process(self) -> None:
        """Raises CaptionError in a process that was forked with the Captioner in it: it has none of its threads, so
        that a caption would never come."""
        if os.getpid() != self._process:
            raise CaptionError(
                "this Captioner belongs to the process that made it; make another in each process that is forked"
            )

    def _begin(
        self, asked: Asked, image: Image, future: _Pending, tokens: "queue.SimpleQueue[int | None] | None" = None
    ) -> None:
        """Decodes an image and submits it to the engine. An error becomes the exception of the future."""
        try:
            if not future.cancelled():
                began, on_token = time.monotonic(), None if tokens is None else tokens.put
                pixels, future.size = self._pixels(image)
                self._model.engine.submit(asked.request("", pixels, future, on_token, began))
        except Exception as error:
            with suppress(InvalidStateError):
                future.set_exception(error)

    def _pixels(self, image: Image) -> tuple[Any, tuple[int, int]]:
        """Returns the pixels for the encoder, and the (width, height) of the upright image."""
        transform = self._model.checkpoint.transform
        image = image if isinstance(image, str | os.PathLike) or _is_of_pillow(image) else _copied(image)
        if isinstance(image, str | os.PathLike | bytes):
            decoded = transform.decode(image if isinstance(image, bytes) else Path(image).read_bytes())
            return decoded.pixels, decoded.size
        if _is_of_pillow(image):
            from snapcap.models.processing.image import upright_size  # noqa: PLC0415  a program with files alone decodes later

            with self._pillow:
                return transform.convert(image), upright_size(image)
        if _is_array(image):
            return transform.convert(_from_array(image)), (image.shape[1], image.shape[0])
        raise CaptionError(
            f"{type(image).__name__} is no image; give the name of a file, its bytes, a Pillow image or a numpy "
            "array"
        )

    def _caption(self, asked: Asked, future: _Pending) -> Caption:
        self._check_process()
        try:
            done = future.result()
        except Exception as error:
            raise self._error(error) from error
        text, regions = self._model.defaults.answer(asked.resolved, done.tokens, future.size)
        seconds = done.queue_s + done.encode_s + done.decode_s
        found = None if regions is None else tuple(regions)
        return Caption(text, len(done.tokens), done.finish_reason, done.backend, seconds, found)

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
        known = isinstance(error, _SAYS_ALL)
        return CaptionError(reason_of(error) if known else f"{type(error).__name__}: {reason_of(error)}")

    def _in_order(self, images: Iterable[Image], asked: Asked) -> Generator[Caption | CaptionError, None, None]:
        waiting: deque[_Pending] = deque()
        ahead = images_ahead(self._model, self._threads, asked.resolved.params.num_beams)
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

    def _later(self, asked: Asked, image: Image) -> _Pending:
        future = _Pending()
        if self._closed:
            future.set_exception(_closed())
        elif _is_of_pillow(image):  # decoded now: the caller may close it when the next image is taken
            self._begin(asked, image, future)
        else:
            try:
                self._pool.submit(self._begin, asked, _copied(image), future)
            except ValueError as error:  # a closed BytesIO, a released memoryview
                future.set_exception(error)
            except RuntimeError as error:  # another thread has closed the pool since the check
                future.set_exception(_closed() if self._closed else error)
        return future

    def _outcome(self, asked: Asked, future: _Pending) -> Caption | CaptionError:
        try:
            return self._caption(asked, future)
        except CaptionError as error:
            # The frames of a traceback keep the image in memory: as long as the caller keeps the error, and until a
            # garbage collection, because the traceback and the future refer to each other.
            if isinstance(error.__cause__, _SAYS_ALL):
                error.__cause__.__context__ = error.__cause__.__traceback__ = None
            return error.with_traceback(None)

    def _pieces(self, asked: Asked, image: Image) -> Generator[str, None, None]:
        future = _Pending()
        tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        future.add_done_callback(lambda _: tokens.put(None))
        tokenizer, prompt_ids = self._model.defaults.tokenizer(asked.resolved.task), asked.resolved.prompt_ids
        text = tokenizer.stream(prompt_ids)
        shown = self._model.defaults.pieces(asked.resolved)
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


def _is_of_pillow(image: object) -> "TypeGuard[PilImage]":
    return hasattr(image, "getexif")


def _is_array(image: object) -> "TypeGuard[NDArray[Any]]":
    return hasattr(image, "__array_interface__")


def _is_one_image(images: object) -> bool:
    """Tells whether a program gave one image where images belong. An array of text, or with a fourth dimension,
    holds images."""
    if isinstance(images, str | os.PathLike | bytes | bytearray | memoryview | io.BytesIO) or _is_of_pillow(images):
        return True
    return _is_array(images) and images.ndim < 4 and images.dtype.kind in "biuf"


def _copied(image: Image) -> Image:
    """Returns what the caller cannot change: the bytes of a buffer, or a copy of an array."""
    if isinstance(image, io.BytesIO):
        return image.getvalue()
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    return image.copy() if _is_array(image) else image


def _from_array(array: "NDArray[Any]") -> "PilImage":
    """Returns the Pillow image of an array of RGB pixels. Raises CaptionError for another array."""
    from PIL import Image as Pillow  # noqa: PLC0415  a program with arrays alone may not have imported it

    if array.dtype != "uint8" or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        shape = " × ".join(map(str, array.shape))
        raise CaptionError(
            f"an array must be uint8, height × width × 3 (RGB), not {array.dtype}, {shape or 'a number'}"
        )
    return Pillow.fromarray(array)


def _closed() -> CaptionError:
    return CaptionError("this Captioner is closed; make another")


def _end(offline: OfflineModel, pool: ThreadPoolExecutor, process: int) -> None:
    """Ends a Captioner that was never closed. Waits for the device thread for a limited time, as it may hang. Does
    nothing in a process that was forked: a lock may have been taken when it was, and is then never free again."""
    if os.getpid() != process:
        return
    pool.shutdown(wait=False, cancel_futures=True)
    offline.close(_PATIENCE_S)
