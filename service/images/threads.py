"""Decodes images on threads of this process, which cannot be killed.

Threads are for a user's own images, and for servers behind another server. `snapcap serve` decodes in processes.
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
from snapcap.warmup.machine.capacity import available_cpus

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform


def decode_threads(asked: int) -> int:
    """Returns the number of decode threads: `asked`, or if that is 0 one for each CPU, up to 8.

    Between Pillow's calls each thread needs the interpreter lock. With 16 threads on 16 CPUs the server's
    throughput was lower than with 8 (``snapcap bench throughput --serve=--decode-threads=16``).
    """
    return asked or min(available_cpus(), 8)


class ThreadImageDecoder:
    """Decodes images on the threads of `pool`, where it also calls `done`. `room`: the most bytes of memory that
    decoding one image may take; None sets no limit."""

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
        # Already imported by now.
        from snapcap.models.processing.image_error import ImageError, NeedsMemory  # noqa: PLC0415

        began = time.monotonic()
        try:
            decoded = self._transform.decode(image, self._room)
        except ImageError as error:
            return UnreadableImage(error.reason, str(error))
        except NeedsMemory as needs:
            return too_large(needs.size, self._room or 0)
        return DecodedImage(decoded.pixels, decoded.format, began, time.monotonic() - began)
