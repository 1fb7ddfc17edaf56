"""Runs `snapcap serve` in the order that starts fastest: bind, hand over, fork, then import the HTTP server.

The processes import side by side, each with an interpreter's lock of its own.
"""

import contextlib
import gc
import logging
import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from snapcap.service.config.settings import ResidencySettings, Settings
from snapcap.service.ipc.fork import ForkError
from snapcap.service.readiness import ExitStatus
from snapcap.service.server.processes import ForkedEngine, ServerProcesses, fork_processes
from snapcap.service.telemetry import logs
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
    from snapcap.service.http.access import ApiKeys
    from snapcap.service.server.http_process import StartModel

_logger = logging.getLogger("snapcap.start")
_BACKLOG = 2048
# Bytes of each connection's buffers in the kernel, which doubles them for its own use and counts them as memory of
# the container. Without these sizes the kernel would let a buffer grow to megabytes while its client's bytes are
# not read.
RECEIVE_BUFFER = 128 << 10
SEND_BUFFER = 64 << 10


class BindError(OSError):
    """The address cannot be listened on. The message is one line that names the address and says what to do."""


def serve(settings: Settings, engine: ForkedEngine | None = None) -> int:
    """Serves until a signal. Returns exit status 0, or an `ExitStatus` with a last line that says why. `engine` is
    the engine process, if it is forked already. Raises SettingsError if the file of keys cannot be used."""
    # Garbage collection is off until READY: imported objects stay, and checking all of them again and again takes
    # an eighth of the start.
    gc.disable()
    timeline = Timeline.since_exec()
    logs.configure(settings.log.format, settings.log.level)
    models: dict[str, Settings] = {}
    first = [settings]  # the models that must be ready before READY
    if "=" in settings.model.source or settings.residency != ResidencySettings():
        from snapcap.service.config.models import models_of, preloaded  # noqa: PLC0415 - few servers have several

        if models := models_of(settings):
            first = [models[name] for name in preloaded(settings, models)]
    if not all(_has_model(each) for each in models.values() or (settings,)):
        return ExitStatus.START_FAILED
    http = settings.http
    keys: ApiKeys | None = None
    listeners: list[socket.socket] = []
    if http.api_key_file is not None:
        from snapcap.service.http.access import read_api_keys  # noqa: PLC0415 - the bind must not wait for hashlib

        keys = read_api_keys(http.api_key_file)
    try:
        with timeline.phase("bind"):
            listeners.append(bind(http.host, http.port))
            if http.metrics_port is not None:
                listeners.append(bind(http.host, http.metrics_port, "--metrics-port"))
        # All imports that take long come after the fork, and also after the bind, so that probes can wait in the
        # backlog.
        parts = fork_processes(first[0], timeline, listeners, engine) if first else None
    except (BindError, ForkError) as error:
        print(f"snapcap: {error}", file=sys.stderr)
        return ExitStatus.FAILED
    except OSError as error:  # too many processes, or no memory for one more
        print(f"snapcap: the server's processes cannot be started: {error}", file=sys.stderr)
        return ExitStatus.FAILED
    from snapcap.service.server.http_process import run  # noqa: PLC0415

    start = partial(_load_start, models, parts, None if first else engine)
    return run(settings, listeners, keys, timeline, start, len(models))


def _has_model(settings: Settings) -> bool:
    """Checks, if the model is a folder of this machine, that it holds a model. Prints the reason and returns False
    if not."""
    source = settings.model.source
    if source == "demo":  # nothing to check, and nothing to import
        return True
    from snapcap.warmup.checkpoints.local import CheckpointError, local_folder  # noqa: PLC0415

    try:
        local_folder(source)
    except CheckpointError as error:
        _logger.error("failed", extra={"fields": {"error": str(error)}})
        print(f"snapcap: {error}", file=sys.stderr)
        return False
    return True


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """Returns a listening socket, in whose backlog connections wait until the application is there.

    `host` may have the brackets that an IPv6 address has in a URL. `option` is the option that chooses the port,
    for the message of BindError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: the name has an empty or too long label
        reason = getattr(error, "strerror", None) or str(error)
        raise BindError(f"cannot listen on {host}:{port}: {reason}; choose with --host and {option}") from None
    return listener


def _load_start(
    models: Mapping[str, Settings], parts: ServerProcesses | None, spare: ForkedEngine | None
) -> "StartModel":
    """Imports the modules of the start. `models`: the models that may wake and leave. `parts`: the processes of the
    first model that must be ready before READY. `spare`: without such a model, the engine process, which stays in
    reserve."""
    if parts is not None and not models:
        from snapcap.service.server.monitor import follow  # noqa: PLC0415 - once /livez answers

        return partial(follow, parts)
    from snapcap.service.server.residency import known, reside  # noqa: PLC0415 - likewise

    return partial(reside, models, {name: known(each) for name, each in models.items()}, parts, spare)


def leave(status: int) -> NoReturn:
    """Ends the process now, without finalizing the interpreter: a thread inside native code, such as the device
    thread of `snapcap caption`, would crash it. Output and logs are flushed, and nothing else is left to do."""
    try:
        for finish in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(Exception):  # the disk is full, or the pipe is closed
                finish()
    finally:
        os._exit(status)
