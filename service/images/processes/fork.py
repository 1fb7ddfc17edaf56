"""Forks the parent of the decode processes, and chooses how many there are to be."""

import socket
from collections.abc import Iterable

from snapcap.models.dataclass import dataclass
from snapcap.service.ipc.fork import ChildProcess, Closable, fork_child
from snapcap.warmup.machine.cpus import available_cpus

_MOST = 12
_MOST_OF_FEW_CPUS = 4


@dataclass(frozen=True)
class ImageProcesses:
    """How many processes there are to be, and the one that forks them, whose `end` they come through."""

    count: int
    parent: ChildProcess


def decode_processes(asked: int | None) -> int:
    """How many processes decode: as many as asked for; without a number five of eight CPUs and at most 12, and on
    few CPUs one for each and at most 4.

    Beside the model, decoding is most of a request's CPU time (benchmarks/NOTES.md). The other CPUs
    are for the HTTP and the engine process, and for background builds.
    """
    if asked is not None:
        return asked
    cpus = available_cpus()
    return max(min(cpus * 5 // 8, _MOST), min(cpus, _MOST_OF_FEW_CPUS))


def fork_image_processes(count: int, others: Iterable[Closable]) -> ImageProcesses:
    """Start the process that starts the others.

    `others`: what it must not hold open.

    Raises:
        ForkError: this system cannot fork.
    """
    return ImageProcesses(count, fork_child(lambda end: _serve_image_processes(count, end), others))


def _serve_image_processes(count: int, end: socket.socket) -> int:
    from snapcap.service.images.processes.supervisor import serve_image_processes  # noqa: PLC0415  in the child only

    return serve_image_processes(count, end)
