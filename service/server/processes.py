"""Forks the engine process and the parent of the decode processes, with the memory that all of them share."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass

from snapcap.service.config.settings import Settings
from snapcap.service.images.processes.fork import DecodeProcesses, decode_processes, fork_decoding
from snapcap.service.ipc.fork import ChildProcess
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.service.server.engine_process.fork import Serve, fork_engine
from snapcap.warmup.progress.timeline import Timeline


@dataclass(frozen=True)
class Parts:
    """As the HTTP process has them."""

    engine: ChildProcess
    decoding: DecodeProcesses
    pixels: SharedPixels


def fork_parts(
    settings: Settings, timeline: Timeline, listeners: Iterable[socket.socket], serve: Serve | None = None
) -> Parts:
    """Fork them: as early as can be, since each begins with imports of its own.

    `listeners`: what they must not hold open. `serve`: what the engine process does, if not that.

    Raises:
        ForkError: this system cannot fork.
    """
    count = decode_processes(settings.decoding.processes)
    # Two for each decode process: one that has died holds its own until that is heard.
    pixels = SharedPixels(settings.queue.size + 2 * count)
    listeners = list(listeners)
    engine = fork_engine(settings, timeline, pixels, listeners, serve)
    return Parts(engine, fork_decoding(count, pixels, [*listeners, engine.end]), pixels)
