"""Forks the parent of the decode processes, and chooses the number of decode processes."""

import socket
from collections.abc import Iterable

from snapcap.models.dataclass import dataclass
from snapcap.service.ipc.fork import ChildProcess, Closable, fork_child
from snapcap.warmup.machine.capacity import available_cpus

_MOST = 12
_MOST_OF_FEW_CPUS = 4


@dataclass(frozen=True)
class ImageProcesses:
    """Holds the number of decode processes and their parent. New processes' sockets come through the parent's
    `end`."""

    count: int
    parent: ChildProcess


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


def fork_image_processes(count: int, others: Iterable[Closable]) -> ImageProcesses:
    """Forks the parent, which forks `count` decode processes later. `others`: open files that the parent must
    close.

    Raises:
        ForkError: this system cannot fork.
    """
    return ImageProcesses(count, fork_child(lambda end: _serve_image_processes(count, end), others))


def _serve_image_processes(count: int, end: socket.socket) -> int:
    # The child alone imports it.
    from snapcap.service.images.processes.supervisor import serve_image_processes  # noqa: PLC0415

    return serve_image_processes(count, end)
