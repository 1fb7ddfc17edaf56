"""Decoding on threads of this process."""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from service.decoder import Done, NotWanted, Outcome, Picture, Unreadable
from warmup.cpus import available_cpus

if TYPE_CHECKING:
    from models.preprocess import ImageTransform


def decode_threads(asked: int) -> int:
    """How many threads decode: as many as asked for, and where that is 0 one for each CPU, but no more than 8.

    Between two pieces of Pillow's work each needs Python's lock: with 16 threads on 16 CPUs the server captioned
    less than with 8 (``snapcap bench throughput --serve=--decode-threads=16``).
    """
    return asked or min(available_cpus(), 8)


class ThreadDecoder:
    """A `Decoder`. `done` is called on the thread that has decoded."""

    def __init__(self, pool: Executor, transform: "ImageTransform") -> None:
        self._pool = pool
        self._transform = transform

    def decode(self, image: bytes, left: Callable[[], bool], done: Done) -> None:
        self._pool.submit(self._run, image, left, done)

    def _run(self, image: bytes, left: Callable[[], bool], done: Done) -> None:
        try:
            outcome: Outcome = NotWanted() if left() else self._decode(image)
        except Exception as error:
            outcome = error
        done(outcome)

    def _decode(self, image: bytes) -> Outcome:
        from models.image import ImageError  # noqa: PLC0415  Pillow and numpy, imported by now

        began = time.monotonic()
        try:
            decoded = self._transform.decode(image)
        except ImageError as error:
            return Unreadable(error.reason, str(error))
        return Picture(decoded.pixels, decoded.format, began, time.monotonic() - began)
