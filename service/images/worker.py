"""Decodes images in a separate process, one at a time, and writes their pixels into a file of one image."""

import logging
import os
import resource
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.processing.image_formats import TIFF_HEADS, ImageError, NeedsMemory, is_readable
from snapcap.service.images.messages import (
    HEAD,
    Answer,
    Broken,
    Decoded,
    Needs,
    Refused,
    pack_answer,
    receive_exactly,
)
from snapcap.service.ipc.fork import return_large_memory
from snapcap.service.ipc.shared_pixels import write_image
from snapcap.warmup.machine.capacity import first_for_the_oom_killer
from snapcap.warmup.machine.confined import confine
from snapcap.warmup.machine.denied import is_sealed, process_limit

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform

# Bytes that decoding may take beyond its estimate, for tables of codecs and the interpreter.
SLACK = 64 << 20
# Bytes beyond the largest estimate of an image: the slack, and a large body with its copies.
_OTHER = 4 * SLACK
# The pixels of 2 megapixels have less: mapping them anew took a PNG 14 % longer.
_LARGE_BLOCK = 8 << 20
# Score for the kernel's OOM killer, up to 1000: it kills this process before the processes that serve.
_OOM_SCORE = 500


class MemoryNet:
    """Limits this process's address space, in case the memory estimate of an image is too low. A codec that
    exceeds the limit gets a memory error, and the OOM killer does not act."""

    def __init__(self, most: int) -> None:
        """`most`: the largest number of bytes for an image. Code that took the process over cannot raise it."""
        self._base = _address_space()
        self._room = -1
        if self._base is not None:
            _, hard = process_limit(resource.RLIMIT_AS)
            most += self._base + _OTHER
            self._hard = most if hard == resource.RLIM_INFINITY else min(most, hard)
            self._limit(self._hard)

    def allow(self, room: int) -> None:
        """Allows `room` bytes beyond the address space that the process had at its start."""
        if self._base is None or room == self._room:
            return
        self._limit(self._base + room + SLACK)
        self._room = room

    def _limit(self, size: int) -> None:
        with suppress(ValueError, OSError):  # this system has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (min(size, self._hard), self._hard))


class QuietTiff:
    """Discards standard error while a TIFF is decoded, because libtiff writes a line for each bad row."""

    def __init__(self, errors: int) -> None:
        """`errors`: the descriptor that is standard error otherwise."""
        self._kept, self._nowhere = errors, os.open(os.devnull, os.O_WRONLY)

    @contextmanager
    def around(self, image: bytes) -> Iterator[None]:
        if not image.startswith(TIFF_HEADS):
            yield
            return
        os.dup2(self._nowhere, 2)
        try:
            yield
        finally:
            os.dup2(self._kept, 2)


def decode_images(
    end: socket.socket, file: int, errors: int, transform: "ImageTransform", most: int, report: bool = True
) -> int:
    """Decodes images until the other end is closed. Returns the exit status 0.

    Args:
        end: the socket that brings images and takes answers.
        file: descriptor of an `image_file`, which gets the pixels of each image.
        errors: descriptor of a file that becomes standard error before the first image: code of an image could
            fill the log.
        transform: decodes and resizes. Its modules are already imported, because this process can open no file.
        most: the largest number of bytes of memory for an image.
        report: log calls that the system denies; False where another process has logged them.
    """
    if not report:
        logging.getLogger("snapcap.machine").setLevel(logging.ERROR)
    first_for_the_oom_killer(_OOM_SCORE)
    _close_others({2, end.fileno(), file, errors})
    return_large_memory(_LARGE_BLOCK)
    net, quiet = MemoryNet(most), QuietTiff(errors)
    if not is_sealed(file):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(file).st_size,) * 2)
    confine(threads=is_readable("heic"))  # libheif starts a thread for each picture
    os.dup2(errors, 2)
    return answer_images(end, file, transform, net, quiet)


def _close_others(kept: set[int]) -> None:
    """Closes all files but the kept ones, because the program that started the server may have left some open."""
    with suppress(OSError):  # not Linux
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with suppress(OSError):  # the list's own
                    os.close(int(name))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nowhere, standard)
    if nowhere > 2:
        os.close(nowhere)


def answer_images(
    end: socket.socket, file: int, transform: "ImageTransform", net: MemoryNet, quiet: QuietTiff
) -> int:
    """Answers images as `decode_images` does, without confining the process, which may have other work."""
    try:
        while (head := receive_exactly(end, HEAD.size)) is not None:
            length, room = HEAD.unpack(head)
            net.allow(max(room, 3 * length))
            image = receive_exactly(end, length)
            if image is None:
                break
            with quiet.around(image):
                answer = _decode(image, room, file, transform)
            del image
            end.sendall(pack_answer(answer))
    except ConnectionError:  # the socket was closed while an answer was sent
        pass
    return 0


def _decode(image: bytes, room: int, file: int, transform: "ImageTransform") -> Answer:
    began = time.monotonic()
    try:
        decoded = transform.decode(image, room)
        write_image(file, decoded.rgb.data)
    except ImageError as error:
        return Refused(error.reason, str(error))
    except NeedsMemory as needs:
        return Needs(needs.size)
    except MemoryError:
        sentence = f"the image takes more than {room + SLACK >> 20} MiB of memory to be decoded; save it anew"
        return Refused("too_large", sentence)
    except Exception:
        return Broken(traceback.format_exc())
    return Decoded(decoded.format, began, time.monotonic() - began, decoded.size)


def _address_space() -> int | None:
    """Returns the size of this process's address space in bytes; None if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
