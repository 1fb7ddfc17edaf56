"""Forks the engine process and the parent of the decode processes, with the memory that all of them share.

The engine process is forked before the command line is read, and is handed the settings once they are:

    fork ─▶ child: imports what has compiled parts ─▶ begins torch's libraries ─▶ the settings ─▶ serves
         └▶ parent: imports the command line, reads the settings, binds ─▶ hands them over ─▶ forks the other

A start waits for torch's libraries, and those for the imports in front of them, which need no setting. This module
imports little, as both processes wait for it.
"""

import gc
import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from snapcap.models.dataclass import dataclass
from snapcap.service.ipc.fork import ChildProcess, ForkError, fork_child, how_it_ended

if TYPE_CHECKING:
    from snapcap.service.config.settings import Settings
    from snapcap.service.images.processes.fork import ImageProcesses
    from snapcap.service.ipc.shared_pixels import SharedPixels
    from snapcap.warmup.progress.timeline import Timeline

    # settings, the socket, shared pixels, the moment of exec, and seconds after it since when this process imports
    Serve: TypeAlias = Callable[[Settings, socket.socket, SharedPixels, float, float], int]


@dataclass(frozen=True)
class ServerProcesses:
    """As the HTTP process has them."""

    engine: ChildProcess
    images: "ImageProcesses"
    pixels: "SharedPixels"


class ForkedEngine(NamedTuple):
    """The engine process, which waits for ``hand_over``; when its socket is closed instead, it ends."""

    process: ChildProcess

    def hand_over(self, settings: "Settings", pixels: "SharedPixels", origin: float) -> None:
        """Have it serve. ``origin``: the moment of exec.

        Raises:
            ForkError: it has ended; says how.
        """
        from snapcap.service.ipc.framing import pack  # noqa: PLC0415  pickle, which the fork does not wait for

        # First what a GPU's driver waits for, which is read without importing what settings are made of.
        messages = pack(settings.compute.device) + pack((settings, pixels.slots, origin))
        try:
            sent = socket.send_fds(self.process.end, [messages], [pixels.file])
            self.process.end.sendall(messages[sent:])
        except (BrokenPipeError, ConnectionResetError):
            code = os.waitstatus_to_exitcode(os.waitpid(self.process.pid, 0)[1])
            raise ForkError(f"the engine process ended {how_it_ended(code)}") from None


def fork_engine(serve: "Serve | None" = None, others: Iterable[socket.socket] = ()) -> ForkedEngine:
    """``serve``: what it does with what it is handed, if not serve captions. ``others``: what it must not hold.

    Raises:
        ForkError: this system cannot fork.
        OSError: it has no memory, or too many processes.
    """
    return ForkedEngine(fork_child(partial(_import_and_serve, serve or serve_captions), others))


def fork_processes(
    settings: "Settings",
    timeline: "Timeline",
    listeners: Iterable[socket.socket],
    engine: ForkedEngine | None = None,
) -> ServerProcesses:
    """Have the engine process serve, and fork the other.

    `listeners`: what they must not hold open. `engine`: the engine process, where it is there already.

    Raises:
        ForkError: this system cannot fork, or the engine process has ended.
        OSError: it has no memory, or too many processes.
    """
    from snapcap.service.images.processes.fork import decode_processes, fork_image_processes  # noqa: PLC0415
    from snapcap.service.ipc.shared_pixels import SharedPixels  # noqa: PLC0415

    engine = engine or fork_engine(others=listeners)
    count = decode_processes(settings.image_processes.count)
    # There is always a slot to take. A request has one from the moment its image is decoded until it has its row or
    # has ended, and gives it back before its place in the queue is free (`Admission`): as many as there are places.
    # The rehearsal, with an image for each process, is over before clients are served. The last slot is for the
    # picture with which the server finds out whether images can be decoded at all.
    pixels = SharedPixels(max(settings.queue.size, count) + 1)
    engine.hand_over(settings, pixels, timeline.origin)
    images = fork_image_processes(count, [*listeners, engine.process.end, pixels])
    return ServerProcesses(engine.process, images, pixels)


def _import_and_serve(serve: "Serve", end: socket.socket) -> int:
    importing = time.monotonic()
    gc.disable()  # as `snapcap serve` does until READY
    from snapcap.service.ipc.framing import receive_message  # noqa: PLC0415  in the child only
    from snapcap.warmup.machine.torch_libraries import begin_torch_libraries, import_compiled  # noqa: PLC0415

    import_compiled()
    files: list[int] = []
    try:
        device: str = receive_message(end, files)
        from snapcap.warmup.machine.device_context import begin_device_context  # noqa: PLC0415

        begin_device_context(device)
        handed: tuple[Any, ...] = receive_message(end, files)
    except EOFError:  # the command line was wrong, or the address is taken, as the parent says
        return 0
    settings, slots, origin = handed
    compute = settings.compute
    if compute.backend in ("eager", "jit") or compute.dtype == "bfloat16" or not settings.model.prepared_weights:
        begin_torch_libraries()  # it is certain by now that they are needed
    from snapcap.service.ipc.shared_pixels import SharedPixels  # noqa: PLC0415

    return serve(settings, end, SharedPixels(slots, files[0]), origin, importing - origin)


def serve_captions(
    settings: "Settings", end: socket.socket, pixels: "SharedPixels", origin: float, importing: float
) -> int:
    """What the engine process does."""
    from snapcap.service.telemetry import logs  # noqa: PLC0415

    logs.configure(settings.log.format, settings.log.level)
    from snapcap.warmup.start.published import begin_fetcher  # noqa: PLC0415

    fetcher = begin_fetcher(settings)  # whose process imports for longer than this one
    from snapcap.service.server.engine_process.run import serve_engine  # noqa: PLC0415

    return serve_engine(settings, end, pixels, origin, importing, fetcher)
