"""Decodes images in processes: the protocol of a decoder with its input and result, and the fork of the processes.

`snapcap caption` and the library decode a user's own images in threads, which cannot be killed. `snapcap serve`
decodes in processes. This module forks the parent of these processes (`parent.py`) before the server imports
`pool.py`, which gives images to them.
"""

import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import UnprocessableImage
from snapcap.service.ipc.fork import ChildProcess, Closable, fork_child
from snapcap.warmup.machine.capacity import available_cpus
from snapcap.warmup.machine.denied import library_file, report_denied

if TYPE_CHECKING:
    import numpy as np

    from snapcap.models.processing.transform import ImageTransform
    from snapcap.service.memory import BodyAccount

_MOST = 12  # decode processes
_MOST_OF_FEW_CPUS = 4


@dataclass(frozen=True)
class EncodedImage:
    """Holds an image to decode. `deadline`: the moment of `time.monotonic` at which the request expires. `account`
    counts the image's bytes until the decoder is done with the image."""

    data: bytes
    request_id: str
    deadline: float
    account: "BodyAccount | None" = None


@dataclass(frozen=True)
class DecodedImage:
    """Holds a decoded image: its pixels as uint8 [H, W, 3] or the number of their slot of the shared pixels, and
    its file's format. `began` is a moment of `time.monotonic`; `seconds` is the time that decoding took. `size` is
    the (width, height) of the upright image that was sent. `free_slot` frees the slot, if the pixels are in one."""

    pixels: "np.ndarray[Any, np.dtype[np.uint8]] | int"
    format: str
    began: float
    seconds: float
    size: tuple[int, int]
    free_slot: Callable[[], object] | None = None

    def discard(self) -> None:
        """Frees the memory of pixels that no engine has taken."""
        if self.free_slot is not None:
            self.free_slot()


class ImageDecoder(Protocol):
    """Decodes images, as `ProcessImageDecoder` does. The rehearsal has a decoder of its own."""

    async def decode(self, encoded: EncodedImage) -> DecodedImage:
        """Decodes an image. The caller passes the pixels to an engine, or discards the image. Cancelling the call
        withdraws the image.

        Raises:
            UnprocessableImage: the image cannot be used.
            DeadlineExceeded, ImageMemoryFull, NotReady, or an error that no image should cause.
        """


def unreadable(reason: str, sentence: str) -> UnprocessableImage:
    """Returns the error for an image that cannot be used. `reason` is a label for metrics. `sentence` says why or
    what to do, without capital and full stop."""
    return UnprocessableImage(f"{sentence[:1].upper()}{sentence[1:]}.", reason)


def with_library(transform: "ImageTransform", library: bytes | None) -> "ImageTransform":
    """Returns the transform with the image library, whose content is `library` and which stays mapped; without it,
    if there is none or it cannot be used."""
    if library is None:
        return transform
    from snapcap.models.processing.resample import Resampler  # noqa: PLC0415 - a process that passes images on

    try:
        with library_file(library) as name:
            return replace(transform, resampler=Resampler.open(name))
    except OSError as error:
        report_denied("a file in memory", "Pillow resizes images", str(error))
        return transform


def decode_threads(asked: int) -> int:
    """Returns the number of decode threads: `asked`, or if that is 0 one for each CPU, up to 8.

    Between Pillow's calls each thread needs the interpreter lock. With 16 threads on 16 CPUs the server's
    throughput was lower than with 8 (`snapcap bench throughput`, in the tree up to f6f6acf).
    """
    return asked or min(available_cpus(), 8)


def decode_processes(asked: int | None) -> int:
    """Returns the number of decode processes: `asked`, or if that is None five for eight CPUs, at most 12. Few
    CPUs get one each, up to 4.

    Apart from the model, decoding takes most of a request's CPU time (benchmarks/NOTES.md). The remaining CPUs are
    for the HTTP process, the engine process and background builds.
    """
    if asked is not None:
        return asked
    cpus = available_cpus()
    return max(min(cpus * 5 // 8, _MOST), min(cpus, _MOST_OF_FEW_CPUS))


def fork_image_processes(count: int, others: Iterable[Closable]) -> ChildProcess:
    """Forks the parent, which forks `count` decode processes later, whose sockets come through the parent's `end`.
    `others`: open files that the parent must close.

    Raises:
        ForkError: this system cannot fork.
    """

    def serve(end: socket.socket) -> int:
        from snapcap.service.images.parent import serve_image_processes  # noqa: PLC0415  only the child needs it

        return serve_image_processes(count, end)

    return fork_child(serve, others)
