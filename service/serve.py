"""`snapcap serve`, in the order that makes the start fast: bind, then import and build what answers."""

import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from service import logs
from service.bind import BindError, bind
from service.config import Settings
from warmup.timeline import Timeline

if TYPE_CHECKING:
    from service.api_keys import ApiKeys
    from service.app import Services

# Called on the event loop once /livez answers; it goes on in a thread and returns at once, with what is to be
# called when the server has ended. The last argument ends the server, for a start that failed.
Start: TypeAlias = Callable[[Settings, "Services", Callable[[], None]], Callable[[], object]]


def serve(settings: Settings, start: Start) -> int:
    """Serves until a signal. Exit status 0, or 1 when the address is taken or the start has failed.

    Raises SettingsError when the file of keys cannot be used."""
    # Until READY: an import makes objects that stay, and looking through them all again and again is an eighth of
    # the start.
    gc.disable()
    timeline = Timeline.since_exec()
    logs.configure(settings.log.format, settings.log.level)
    # No line of ours names them, and to find them costs a request more than its line (logging's own advice).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    http = settings.http
    keys: ApiKeys | None = None
    metrics_listener: socket.socket | None = None
    if http.api_key_file is not None:
        from service.api_keys import read_api_keys  # noqa: PLC0415 - hashlib, which the bind must not wait for

        keys = read_api_keys(http.api_key_file)
    try:
        with timeline.phase("bind"):
            listener = bind(http.host, http.port)
            if http.metrics_port is not None:
                metrics_listener = bind(http.host, http.metrics_port, "--metrics-port")
    except BindError as error:
        print(f"snapcap: {error}", file=sys.stderr)
        return 1
    # Only now: from here on a probe waits in the backlog instead of being refused.
    from service.web_imports import import_web  # noqa: PLC0415

    import_web()
    from service.assembly import run  # noqa: PLC0415

    return run(settings, listener, metrics_listener, keys, timeline, start)


def leave(status: int) -> NoReturn:
    """End the process now. A device thread inside native code, perhaps still importing torch, would crash the
    interpreter as it takes itself apart; nothing is left to do that this skips."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
