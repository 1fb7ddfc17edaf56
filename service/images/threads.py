"""Decodes images on threads of this process, which cannot be killed.

They are for images of one's own, and where another server is in front. `snapcap serve` decodes in processes.
"""

import time
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from snapcap.service.images.decoder import (
    DecodedImage,
    Done,
    EncodedImage,
    ImageResult,
    UnreadableImage,
    too_large,
)
from snapcap.warmup.machine.cpus import available_cpus

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform


def decode_threads(asked: int) -> int:
    """How many threads decode: as many as asked for, and where that is 0 one for each CPU, but no more than 8.

    Between two pieces of Pillow's work each needs Python's lock: with 16 threads on 16 CPUs the server captioned
    less than with 8 (``snapcap bench throughput --serve=--decode-threads=16``).
    """
    return asked or min(available_cpus(), 8)


class ThreadImageDecoder:
    """An `ImageDecoder`. `done` is called on the thread that has decoded. `room`: bytes of memory that an image may
    take to be decoded; None: as many as it does."""

    def __init__(self, pool: Executor, transform: "ImageTransform", room: int | None = None) -> None:
        self._pool = pool
        self._transform = transform
        self._room = room

    def decode(self, encoded: EncodedImage, done: Done) -> None:
        self._pool.submit(self._run, encoded, done)

    def _run(self, encoded: EncodedImage, done: Done) -> None:
        try:
            outcome: ImageResult = encoded.given_up(time.monotonic()) or self._decode(encoded.data)
        except Exception as error:
            outcome = error
        done(outcome)

    def _decode(self, image: bytes) -> ImageResult:
        from snapcap.models.processing.image_error import ImageError, NeedsMemory  # noqa: PLC0415  imported by now

        began = time.monotonic()
        try:
            decoded = self._transform.decode(image, self._room)
        except ImageError as error:
            return UnreadableImage(error.reason, str(error))
        except NeedsMemory as needs:
            return too_large(needs.size, self._room or 0)
        return DecodedImage(decoded.pixels, decoded.format, began, time.monotonic() - began)
