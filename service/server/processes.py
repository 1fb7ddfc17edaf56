"""Forks the engine process and the parent of the decode processes, with the memory that all of them share."""

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from snapcap.service.config.settings import Settings
from snapcap.service.images.processes.fork import ImageProcesses, decode_processes, fork_image_processes
from snapcap.service.ipc.fork import ChildProcess, fork_child
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.warmup.progress.timeline import Timeline

Serve: TypeAlias = Callable[[Settings, socket.socket, SharedPixels, float], int]


@dataclass(frozen=True)
class ServerProcesses:
    """As the HTTP process has them."""

    engine: ChildProcess
    images: ImageProcesses
    pixels: SharedPixels


def fork_processes(
    settings: Settings, timeline: Timeline, listeners: Iterable[socket.socket], serve: Serve | None = None
) -> ServerProcesses:
    """Fork them: as early as can be, since each begins with imports of its own.

    `listeners`: what they must not hold open. `serve`: what the engine process does, if not that.

    Raises:
        ForkError: this system cannot fork.
    """
    count = decode_processes(settings.image_processes.count)
    # There is always a slot to take. A decode process has one while it has an image: two for each process, as one
    # that has died has its own until that is heard. Then `RemoteEngine` has it until the request has its row or has
    # ended, and gives it back before the request's place in the queue is free (`Admission`): as many as there are
    # places. The rehearsal, which has a queue of its own with one place, is over before clients are served.
    pixels = SharedPixels(settings.queue.size + 2 * count)
    listeners = list(listeners)
    engine = fork_child(lambda end: (serve or _serve_engine)(settings, end, pixels, timeline.origin), listeners)
    return ServerProcesses(engine, fork_image_processes(count, pixels, [*listeners, engine.end]), pixels)


def _serve_engine(settings: Settings, end: socket.socket, pixels: SharedPixels, origin: float) -> int:
    importing = time.monotonic() - origin
    # In the child only, and first what native code does meanwhile: the start waits for torch's libraries, and a
    # GPU's driver takes longer still.
    from snapcap.warmup.machine.device_context import begin_device_context  # noqa: PLC0415
    from snapcap.warmup.machine.torch_libraries import begin_torch_libraries  # noqa: PLC0415

    begin_device_context(settings.compute.device)
    begin_torch_libraries()
    from snapcap.service.server.engine_process.run import serve_engine  # noqa: PLC0415

    return serve_engine(settings, end, pixels, origin, importing)
