"""Forks the engine process.

It begins to import torch at once, while the HTTP process imports what answers: each has a lock of its own for its
Python code.
"""

import socket
from collections.abc import Callable, Iterable
from typing import TypeAlias

from snapcap.service.config.settings import Settings
from snapcap.service.ipc.fork import ChildProcess, fork_child
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.warmup.progress.timeline import Timeline

Serve: TypeAlias = Callable[[Settings, socket.socket, SharedPixels, float], int]


def fork_engine(
    settings: Settings,
    timeline: Timeline,
    pixels: SharedPixels,
    listeners: Iterable[socket.socket],
    serve: Serve | None = None,
) -> ChildProcess:
    """Start the engine process.

    `listeners`: what the child must not hold open. `serve`: what it does instead of serving the engine.

    Raises:
        ForkError: this system cannot fork.
    """
    return fork_child(lambda end: (serve or _serve_engine)(settings, end, pixels, timeline.origin), listeners)


def _serve_engine(settings: Settings, end: socket.socket, pixels: SharedPixels, origin: float) -> int:
    from snapcap.service.server.engine_process.run import serve_engine  # noqa: PLC0415  in the child only

    return serve_engine(settings, end, pixels, origin)
