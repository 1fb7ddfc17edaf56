"""Forks or spawns the engine process and the parent of the decode processes, with the memory that they share.

The engine process is forked before the command line is read, and gets the settings once they are read:

    fork ─▶ child: imports compiled modules ─▶ receives the settings ─▶ begins to load torch's libraries ─▶ serves
         └▶ parent: imports the command line, reads the settings, binds ─▶ sends them ─▶ forks the decode processes

A model that wakes later has spawned processes, which run this module and do the same after their interpreter's
start. An engine process in reserve imports all that the start of a model imports before it gets settings.

The child imports compiled modules first because they need no setting, and the start waits for them. This module
imports little, because both processes wait for its import.
"""

import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from snapcap.models.dataclass import dataclass
from snapcap.service.ipc.fork import ChildProcess, ForkError, fork_child, how_it_ended, spawn_child, spawned_end

if TYPE_CHECKING:
    from snapcap.service.config.settings import Settings
    from snapcap.service.ipc.shared_pixels import SharedPixels
    from snapcap.warmup.progress.timeline import Timeline

_SPAWNED = "snapcap.service.server.processes"
# Modules that the start of every model imports; they import the others.
_OF_EVERY_START = (
    "snapcap.service.engine.device_thread",
    "snapcap.service.server.engine_process",
    "snapcap.service.telemetry.logs",
    "snapcap.warmup.runtime.aoti.native",
    "snapcap.warmup.start.preparation",
    "snapcap.warmup.start.warmer",
)


@dataclass(frozen=True)
class ServerProcesses:
    """The other processes of a server, as the HTTP process knows them, and the pixels that they share with it.
    `images`: the parent of the decode processes, of which there are `decoders`."""

    engine: ChildProcess
    images: ChildProcess
    decoders: int
    pixels: "SharedPixels"


class ForkedEngine(NamedTuple):
    """The engine process, which waits for the settings that ``hand_over`` sends. If its socket is closed instead,
    it ends."""

    process: ChildProcess

    def hand_over(self, settings: "Settings", pixels: "SharedPixels", origin: float) -> None:
        """Sends the settings and the shared pixels to the engine process, which then serves. ``origin`` is the
        moment of exec. Raises ForkError if the engine process has ended; the message says how."""
        from snapcap.service.ipc.framing import pack  # noqa: PLC0415  the fork must not wait for pickle

        # The device comes first: the driver of a GPU can then be opened before the modules of the settings are
        # imported.
        messages = pack((settings.compute.device, True)) + pack((settings, pixels.slots, origin))
        try:
            sent = socket.send_fds(self.process.end, [messages], [pixels.file])
            self.process.end.sendall(messages[sent:])
        except (BrokenPipeError, ConnectionResetError):
            code = os.waitstatus_to_exitcode(os.waitpid(self.process.pid, 0)[1])
            raise ForkError(f"the engine process ended {how_it_ended(code)}") from None

    def reserve(self, device: str) -> None:
        """Has the engine process load what every model on `device` needs, while it waits for its settings. The
        process takes no memory of the device yet."""
        from snapcap.service.ipc.framing import pack  # noqa: PLC0415  the fork must not wait for pickle

        with suppress(BrokenPipeError, ConnectionResetError):  # `hand_over` reports that the process has ended
            self.process.end.sendall(pack((device, False)))

    def end(self) -> None:
        """Ends the engine process, which has no request, and waits for its end."""
        self.process.end.close()
        with suppress(OSError):
            os.kill(self.process.pid, signal.SIGKILL)
            os.waitpid(self.process.pid, 0)


def fork_engine(others: Iterable[socket.socket] = ()) -> ForkedEngine:
    """Forks the engine process. ``others`` are sockets that it must close. Raises ForkError if this system cannot
    fork, and OSError if the system has no memory left, or too many processes."""
    return ForkedEngine(fork_child(import_and_serve, others))


def fork_processes(
    settings: "Settings",
    timeline: "Timeline",
    listeners: Iterable[socket.socket],
    engine: ForkedEngine | None = None,
) -> ServerProcesses:
    """Hands the settings to the engine process, and forks the parent of the decode processes.

    `listeners` are sockets that the processes must close. `engine` is the engine process, if it is forked already.
    Raises ForkError if this system cannot fork, or the engine process has ended, and OSError if the system has no
    memory left, or too many processes."""
    from snapcap.service.images.decode import decode_processes, fork_image_processes  # noqa: PLC0415
    from snapcap.service.ipc.shared_pixels import SharedPixels  # noqa: PLC0415

    engine = engine or fork_engine(listeners)
    count = decode_processes(settings.image_processes.count)
    pixels = SharedPixels(_slots(settings, count))
    engine.hand_over(settings, pixels, timeline.origin)
    images = fork_image_processes(count, [*listeners, engine.process.end, pixels])
    return ServerProcesses(engine.process, images, count, pixels)


def spawn_engine() -> ForkedEngine:
    """Starts an engine process that waits for its settings, beside a server that has threads. Raises OSError."""
    return ForkedEngine(spawn_child(_SPAWNED, "engine"))


def spawn_processes(settings: "Settings", origin: float, spare: ForkedEngine | None = None) -> ServerProcesses:
    """Starts the processes of a model that wakes. ``spare`` is an engine process that waits for its settings, if
    there is one. ``origin`` is the zero of the wake's timeline. Raises OSError if the system has no memory left, or
    too many processes or open files."""
    from snapcap.service.images.decode import decode_processes  # noqa: PLC0415
    from snapcap.service.ipc.shared_pixels import SharedPixels  # noqa: PLC0415

    count, log = decode_processes(settings.image_processes.count), settings.log
    pixels = SharedPixels(_slots(settings, count))
    engine = spare
    try:
        if engine is not None:
            try:
                engine.hand_over(settings, pixels, origin)
            except ForkError:  # the spare process has ended
                engine.process.end.close()
                engine = None
        if engine is None:
            engine = spawn_engine()
            engine.hand_over(settings, pixels, origin)
        images = spawn_child(_SPAWNED, "images", str(count), log.format, log.level)
    except BaseException:
        pixels.close()
        if engine is not None:
            engine.end()
        raise
    return ServerProcesses(engine.process, images, count, pixels)


def _slots(settings: "Settings", count: int) -> int:
    """Returns the number of slots of shared pixels for `count` decode processes, so that one is always free.

    A request has a slot from the moment its image is decoded until it has its row or has ended, and frees it before
    its place in the queue (`Admission`): one slot for each place. The rehearsal, with an image for each process, is
    over before clients are served. The last slot is for the picture with which the server finds out whether images
    can be decoded at all."""
    return max(settings.queue.size, count) + 1


def import_and_serve(end: socket.socket) -> int:
    """Runs the engine process until its socket is closed. Returns its exit status."""
    importing = time.monotonic()
    gc.disable()  # `snapcap serve` has no garbage collection until READY
    from snapcap.service.ipc.framing import receive_message  # noqa: PLC0415  only the child needs it
    from snapcap.warmup.machine.torch_libraries import (  # noqa: PLC0415  likewise
        begin_device_context,
        begin_torch_libraries,
        import_compiled,
    )

    import_compiled()
    files: list[int] = []
    try:
        device, has_model = receive_message(end, files)
        while not has_model:
            _prepare(device)
            device, has_model = receive_message(end, files)
        begin_device_context(device)
        handed: tuple[Any, ...] = receive_message(end, files)
    except EOFError:  # the parent ended: the command line was wrong or the address is taken, which it reports
        return 0
    settings, slots, origin = handed
    compute = settings.compute
    if compute.backend in ("eager", "jit") or compute.dtype == "bfloat16" or not settings.model.prepared_weights:
        begin_torch_libraries()  # these settings need them for certain
    from snapcap.service.ipc.shared_pixels import SharedPixels  # noqa: PLC0415

    # An engine process in reserve has begun before the start that it is for.
    return serve_captions(settings, end, SharedPixels(slots, files[0]), origin, max(importing - origin, 0.0))


def _prepare(device: str) -> None:
    """Loads what every model on `device` needs, in an engine process in reserve."""
    from snapcap.warmup.machine.torch_libraries import begin_device_libraries  # noqa: PLC0415  other starts do not need it

    begin_device_libraries(device)
    with suppress(Exception):  # the start imports the modules again, and reports the error
        for name in _OF_EVERY_START:
            importlib.import_module(name)


def serve_captions(
    settings: "Settings", end: socket.socket, pixels: "SharedPixels", origin: float, importing: float
) -> int:
    """Serves with the settings that were handed over. `importing`: seconds from exec to the first import."""
    from snapcap.service.telemetry import logs  # noqa: PLC0415

    logs.configure(settings.log.format, settings.log.level)
    from snapcap.warmup.start.published import begin_fetcher  # noqa: PLC0415

    fetcher = begin_fetcher(settings)  # early, because the fetcher's process imports for longer than this one
    from snapcap.service.server.engine_process import serve_engine  # noqa: PLC0415

    return serve_engine(settings, end, pixels, origin, importing, fetcher)


def _run_spawned(arguments: list[str]) -> int:
    """Runs a spawned process until its socket is closed. Returns its exit status. `arguments`: two for
    `spawned_end`, the kind of process, and for the decode processes their number and the format and level of the
    log."""
    end = spawned_end(arguments)
    kind, *more = arguments[2:]
    if kind == "engine":
        return import_and_serve(end)
    from snapcap.service.images.parent import serve_image_processes  # noqa: PLC0415  other processes do not need it
    from snapcap.service.telemetry import logs  # noqa: PLC0415  likewise

    count, style, level = more
    logs.configure(style, level)
    return serve_image_processes(int(count), end)


if __name__ == "__main__":
    exit_status = 1
    try:
        exit_status = _run_spawned(sys.argv[1:])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_status)  # a thread in native code would crash an interpreter that is finalized
