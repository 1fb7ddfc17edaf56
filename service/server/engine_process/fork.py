"""Forks the engine process before the command line is read, and hands it the settings once they are.

    fork ─▶ child: imports what has compiled parts ─▶ begins torch's libraries ─▶ the settings ─▶ serves
         └▶ parent: imports the command line, reads the settings, binds ─▶ hands them over

A start waits for torch's libraries, and those for the imports in front of them, which need no setting. This module
imports little, as both processes wait for it.
"""

import gc
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from snapcap.service.ipc.fork import ChildProcess, fork_child

if TYPE_CHECKING:
    from snapcap.service.config.settings import Settings
    from snapcap.service.ipc.shared_pixels import SharedPixels

    # settings, the socket, shared pixels, the moment of exec, and seconds after it since when this process imports
    Serve: TypeAlias = Callable[[Settings, socket.socket, SharedPixels, float, float], int]


class ForkedEngine(NamedTuple):
    """The engine process, which waits for ``hand_over``; when its socket is closed instead, it ends."""

    process: ChildProcess

    def hand_over(self, settings: "Settings", pixels: "SharedPixels", origin: float) -> None:
        """Have it serve. ``origin``: the moment of exec.

        Raises:
            OSError: it has ended.
        """
        from snapcap.service.ipc.framing import pack  # noqa: PLC0415  pickle, which the fork does not wait for

        # First what a GPU's driver waits for, which is read without importing what settings are made of.
        messages = pack(settings.compute.device) + pack((settings, pixels.slots, origin))
        sent = socket.send_fds(self.process.end, [messages], [pixels.file])
        self.process.end.sendall(messages[sent:])


def fork_engine(serve: "Serve | None" = None) -> ForkedEngine:
    """``serve``: what it does with what it is handed, if not serve captions.

    Raises:
        ForkError: this system cannot fork.
        OSError: it has no memory, or too many processes.
    """
    return ForkedEngine(fork_child(partial(_import_and_serve, serve or serve_captions), ()))


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
        begin_torch_libraries()
        handed: tuple[Any, ...] = receive_message(end, files)
    except EOFError:  # the command line was wrong, or the address is taken, as the parent says
        return 0
    settings, slots, origin = handed
    from snapcap.service.ipc.shared_pixels import SharedPixels  # noqa: PLC0415

    return serve(settings, end, SharedPixels(slots, files[0]), origin, importing - origin)


def serve_captions(
    settings: "Settings", end: socket.socket, pixels: "SharedPixels", origin: float, importing: float
) -> int:
    """What the engine process does."""
    from snapcap.service.telemetry import logs  # noqa: PLC0415

    logs.configure(settings.log.format, settings.log.level)
    from snapcap.service.server.engine_process.run import serve_engine  # noqa: PLC0415

    return serve_engine(settings, end, pixels, origin, importing)
