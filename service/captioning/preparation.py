"""Prepares a request for the device: decodes its image and resolves its text and options."""

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.service.captioning.model_defaults import Resolved
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.errors import EngineFailed, UnprocessableImage
from snapcap.service.images.decoder import (
    DecodedImage,
    Done,
    EncodedImage,
    ImageDecoder,
    ImageResult,
    UnreadableImage,
)
from snapcap.service.memory.bodies import BodyAccount
from snapcap.service.telemetry.metrics import Metrics

Resolve = Callable[[CaptionOptions], Resolved]


@dataclass(frozen=True)
class Prepared:
    """Holds the decoded image and the resolved options of one request."""

    image: DecodedImage
    request: Resolved


class Preparation:
    """Decodes images, and counts the decoded and the unreadable ones in the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def start(
        self,
        encoded: EncodedImage,
        options: CaptionOptions,
        model: tuple[ImageDecoder, Resolve],
        future: "Future[Any]",
        then: Callable[[Prepared], object],
    ) -> None:
        """Starts to decode an image on other threads or processes, and calls `then` when it is decoded.

        `then` takes over the pixels unless it raises. Errors of decoding, of the options and of `then` become the
        future's exception. If the future is cancelled, `then` is not called.
        """
        decoder, resolve = model
        done: Done = partial(self._done, options, resolve, future, then)
        if encoded.account is not None:
            done = partial(_released, encoded.account.hold(), done)
        decoder.decode(encoded, done)

    def _done(
        self,
        options: CaptionOptions,
        resolve: Resolve,
        future: "Future[Any]",
        then: Callable[[Prepared], object],
        outcome: ImageResult,
    ) -> bool:
        """Calls `then` with a decoded image. Returns whether `then` took over the pixels."""
        if future.cancelled():
            return False
        try:
            image = self._image(outcome)
            then(Prepared(image, resolve(options)))
        except BaseException as error:  # a library's panic is no Exception
            told = error
            if not isinstance(error, Exception):
                told = EngineFailed()
                told.__cause__ = error
            with suppress(InvalidStateError):  # the client has left
                future.set_exception(told)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return False
        return True

    def _image(self, outcome: ImageResult) -> DecodedImage:
        """Returns the decoded image and counts the outcome.

        Raises:
            UnprocessableImage: the image cannot be used.
            Exception: the outcome, if it is another error.
        """
        if isinstance(outcome, DecodedImage):
            self._metrics.image_decoded(outcome.format, outcome.seconds)
            return outcome
        if isinstance(outcome, UnreadableImage):
            self._metrics.image_decode_failures.labels(outcome.reason).inc()
            sentence = outcome.sentence
            raise UnprocessableImage(f"{sentence[:1].upper()}{sentence[1:]}.", outcome.reason)
        raise outcome


def _released(account: BodyAccount, done: Done, outcome: ImageResult) -> bool:
    account.release()
    return done(outcome)
