"""Decodes images in a process of its own, one at a time, and writes their pixels into the shared memory."""

import os
import resource
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.processing.image_formats import TIFF_HEADS
from snapcap.service.images.processes.messages import (
    HEAD,
    Answer,
    Broken,
    Decoded,
    Needs,
    Refused,
    pack_answer,
    receive_exactly,
)
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.warmup.machine.denied import process_limit

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform

# What a decode may take beyond its estimate: tables of codecs, and the interpreter's own work.
SLACK = 64 << 20
# The kernel looks for what to kill when memory runs out: this before the processes that serve. Up to 1000.
_OOM_SCORE = "500"


class MemoryNet:
    """The limit of this process's address space, under an estimate that may be wrong: a codec that goes past it is
    refused the memory, and the system's killer is not called."""

    def __init__(self) -> None:
        self._base = _address_space()
        self._room = -1

    def load_codec(self, image: bytes) -> None:
        """What decodes the image stays in the process, and takes nothing from its room."""
        from snapcap.models.processing.codecs import load_codec  # noqa: PLC0415  imported before the fork

        before = _address_space()
        if load_codec(image) and self._base is not None and before is not None:
            self._base += max((_address_space() or before) - before, 0)
            self._room = -1

    def allow(self, room: int) -> None:
        """So many bytes more than the process had when it began."""
        if self._base is None or room == self._room:
            return
        _, hard = process_limit(resource.RLIMIT_AS)
        limit = self._base + room + SLACK
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        with suppress(ValueError, OSError):  # of a system that does not have it
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
            self._room = room


def decode_images(end: socket.socket, pixels: SharedPixels, transform: "ImageTransform") -> int:
    """Until the other end is closed. Exit status 0."""
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    return answer_images(end, pixels, transform, MemoryNet())


def answer_images(
    end: socket.socket, pixels: SharedPixels, transform: "ImageTransform", net: MemoryNet | None = None
) -> int:
    """As `decode_images`, in a process that is for other things too where there is no `net`."""
    try:
        while (head := receive_exactly(end, HEAD.size)) is not None:
            slot, length, room = HEAD.unpack(head)
            if net is not None:
                net.allow(max(room, 3 * length))
            image = receive_exactly(end, length)
            if image is None:
                break
            if net is not None:
                net.load_codec(image)
                net.allow(max(room, 3 * length))
            with quiet_tiff(image) if net is not None else nullcontext():
                answer = _decode(image, slot, room, pixels, transform)
            del image
            end.sendall(pack_answer(slot, answer))
    except ConnectionError:  # closed with an answer under way
        pass
    return 0


@contextmanager
def quiet_tiff(image: bytes) -> Iterator[None]:
    """While a TIFF is decoded, what this process writes to standard error goes nowhere: libtiff has a line for each
    row that is wrong."""
    if not image.startswith(TIFF_HEADS):
        yield
        return
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)


def _decode(image: bytes, slot: int, room: int, pixels: SharedPixels, transform: "ImageTransform") -> Answer:
    from snapcap.models.processing.image_error import ImageError, NeedsMemory  # noqa: PLC0415  imported before the fork

    began = time.monotonic()
    try:
        decoded = transform.decode(image, room)
        pixels.write_bytes(slot, decoded.picture.tobytes())
    except ImageError as error:
        return Refused(error.reason, str(error))
    except NeedsMemory as needs:
        return Needs(needs.size)
    except MemoryError:
        sentence = f"the image takes more than {room + SLACK >> 20} MiB of memory to be decoded; save it anew"
        return Refused("too_large", sentence)
    except Exception:
        return Broken(traceback.format_exc())
    return Decoded(decoded.format, began, time.monotonic() - began)


def _address_space() -> int | None:
    """Of this process, in bytes; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
