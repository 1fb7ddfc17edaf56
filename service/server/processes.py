"""Forks the engine process and the parent of the decode processes, with the memory that all of them share."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass

from snapcap.service.config.settings import Settings
from snapcap.service.images.processes.fork import ImageProcesses, decode_processes, fork_image_processes
from snapcap.service.ipc.fork import ChildProcess
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.service.server.engine_process.fork import ForkedEngine, fork_engine
from snapcap.warmup.progress.timeline import Timeline


@dataclass(frozen=True)
class ServerProcesses:
    """As the HTTP process has them."""

    engine: ChildProcess
    images: ImageProcesses
    pixels: SharedPixels


def fork_processes(
    settings: Settings,
    timeline: Timeline,
    listeners: Iterable[socket.socket],
    engine: ForkedEngine | None = None,
) -> ServerProcesses:
    """Fork them: as early as can be, since each begins with imports of its own.

    `listeners`: what they must not hold open. `engine`: the engine process, where it is there already.

    Raises:
        ForkError: this system cannot fork.
        OSError: it has no memory, or too many processes; or the engine process has ended.
    """
    engine = engine or fork_engine()
    count = decode_processes(settings.image_processes.count)
    # There is always a slot to take. A decode process has one while it has an image: two for each process, as one
    # that has died has its own until that is heard. Then `RemoteEngine` has it until the request has its row or has
    # ended, and gives it back before the request's place in the queue is free (`Admission`): as many as there are
    # places. The rehearsal, which has a queue of its own with one place, is over before clients are served.
    pixels = SharedPixels(settings.queue.size + 2 * count)
    engine.hand_over(settings, pixels, timeline.origin)
    images = fork_image_processes(count, pixels, [*listeners, engine.process.end])
    return ServerProcesses(engine.process, images, pixels)
