"""The fork of the process that forks the decode processes."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass

from service.child_process import ChildProcess, fork_child
from service.shared_pixels import SharedPixels
from warmup.cpus import available_cpus

_MOST = 12
_CPUS_FOR_PROCESSES = 8


@dataclass(frozen=True)
class DecodeProcesses:
    """How many processes there are to be, and the one that forks them, whose `end` they come through."""

    count: int
    parent: ChildProcess


def decode_processes(asked: int | None) -> int:
    """How many processes decode: as many as asked for; without a number five of eight CPUs and at most 12, and on
    less than 8 CPUs none: threads do it.

    Beside the model, decoding is most of a request's CPU time (``python -m benchmarks.http_cost``). The other CPUs
    are for the HTTP and the engine process, and for background builds.
    """
    if asked is not None:
        return asked
    cpus = available_cpus()
    return min(cpus * 5 // 8, _MOST) if cpus >= _CPUS_FOR_PROCESSES else 0


def fork_decoding(count: int, pixels: SharedPixels, others: Iterable[socket.socket]) -> DecodeProcesses | None:
    """Start the process that starts the others; nothing where there are to be none.

    `others`: what it must not hold open.

    Raises:
        ForkError: this system cannot fork.
    """
    if not count:
        return None
    return DecodeProcesses(count, fork_child(lambda end: _serve_decoding(count, end, pixels), others))


def _serve_decoding(count: int, end: socket.socket, pixels: SharedPixels) -> int:
    from service.decode_parent import serve_decoding  # noqa: PLC0415  in the child only

    return serve_decoding(count, end, pixels)
