"""Builds the parts of the HTTP process and runs its server, which is uvicorn's, on a bound socket.

The modules that answer probes are imported first. All others are imported in a thread, while probes are
answered."""

import asyncio
import logging
import math
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import uvicorn
from prometheus_client import CollectorRegistry, disable_created_metrics
from starlette.types import ASGIApp

from snapcap.service.api.app import PortSwitch, Services, create_metrics_app, create_operations_app
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.config.settings import HttpLimits, HttpSettings, Settings
from snapcap.service.http.access import ApiKeys
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.http.connections import MOST_CONNECTIONS, SPARE, Connections
from snapcap.service.http.protocol import BoundedHttpProtocol
from snapcap.service.images.decode import decode_threads
from snapcap.service.memory import BodyBudget, body_memory, memory_limit
from snapcap.service.readiness import Readiness
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.start_metrics import StartupCollector, register_process_collectors
from snapcap.service.telemetry.tracing import open_tracing
from snapcap.warmup.machine.denied import process_limit
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

# Bytes of memory for which one connection is allowed. A connection holds less than 1 MiB: a packet of 256 KiB, 64
# KiB of a body, heads, and the buffers of the kernel.
_MEMORY_OF_CONNECTION = 4 << 20
# Number of open files beside the connections: pipes of the other processes, images that are fetched, packages.
_OTHER_FILES = 256
_FILES_OF_MODEL = 32  # sockets of a further model's processes, and two files for each decode process
_USUAL_FILES = 1024
# Seconds after the grace period, for requests that were refused then and have not ended.
_LAST_SECONDS = 5
_logger = logging.getLogger("snapcap.server")


def body_limits(limits: HttpLimits, threads: int, metrics: Metrics) -> BodyLimits:
    """Returns the limits of bodies, and adds the memory of bodies to the metrics. `threads`: number of threads that
    parse bodies; 0 lets `decode_threads` choose."""
    budget = BodyBudget(body_memory(limits))
    metrics.body_memory.set_function(lambda: budget.held)
    metrics.body_memory_limit.set(budget.limit)
    pool = ThreadPoolExecutor(decode_threads(threads), thread_name_prefix="bodies")
    return BodyLimits(limits.max_body_bytes, limits.body_timeout, limits.body_total_timeout, budget, pool)


def connection_limits(limits: HttpLimits, models: int = 0) -> HttpLimits:
    """Returns the limits with the number of connections. Raises the number of files that this process may open, if
    the connections need it. `models`: number of models that may wake and leave."""
    others = _OTHER_FILES + models * _FILES_OF_MODEL
    wanted = limits.max_connections or max(1, min(MOST_CONNECTIONS, memory_limit() // _MEMORY_OF_CONNECTION))
    files = _allow_files(wanted + SPARE + others)
    possible = min(wanted, max(files - SPARE - others, files // 2))
    if possible < wanted and limits.max_connections:
        fields = {"wanted": wanted, "possible": possible, "open_files": files}
        _logger.warning("fewer connections than --max-connections: raise `ulimit -n`", extra={"fields": fields})
    return replace(limits, max_connections=possible)


def _allow_files(count: int) -> int:
    """Tries to raise the limit of open files to `count`. Returns how many may be open, at most `count`."""
    soft, hard = process_limit(resource.RLIMIT_NOFILE, _USUAL_FILES)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox forbids it
        return soft
    return wanted


class Server(uvicorn.Server):
    """Drains at SIGTERM or SIGINT. The state is DRAINING at once, so /readyz answers 503. `drain_delay` seconds
    later the listeners close, and running requests have the grace period to finish. A second signal ends the
    process at once."""

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        readiness: Readiness,
        on_live: Callable[[], None],
        connections: Connections,
    ) -> None:
        """`on_live` is called when the event loop accepts connections. Logs are configured elsewhere. The server
        runs with `run(sockets=[listener])`."""
        protocol: Any = partial(BoundedHttpProtocol, connections)
        config = uvicorn.Config(
            app,
            http=protocol,
            loop="auto",
            ws="none",
            lifespan="off",
            workers=1,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(settings.grace_period) + _LAST_SECONDS,
        )
        super().__init__(config)
        self._readiness = readiness
        self._connections = connections
        self._drain_delay = settings.drain_delay
        self._grace_period = settings.grace_period
        self._on_live = on_live
        self._signal: int | None = None
        self._close_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._connections.start()
        self._on_live()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connections.exit()
        # Requests that still run after the grace period are refused: their clients retry elsewhere. Otherwise
        # uvicorn would cancel the requests and log a traceback for each.
        last = asyncio.get_running_loop().call_later(self._grace_period, self._connections.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            last.cancel()
            self._connections.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The handler only sets a flag, because it may interrupt code that holds the lock of the readiness or of the
        # log.
        if self._signal:  # not 0, which a failure sets: the first signal must not replace its exit status
            os._exit(128 + sig)
        self._signal = sig

    def begin_exit(self) -> None:
        """Begins to drain, as a signal does."""
        self._signal = self._signal or 0

    async def on_tick(self, counter: int) -> bool:
        """Begins to drain, or to exit, once a signal was seen. Called by uvicorn ten times a second."""
        if self._signal is not None and self._close_at is None:
            self._readiness.drain()
            self._close_at = time.monotonic() + self._drain_delay
            _logger.info("draining", extra={"fields": {"delay_s": self._drain_delay}})
        if self._close_at is not None and time.monotonic() >= self._close_at:
            self.should_exit = True
        return await super().on_tick(counter)


def import_in_background(
    load: Callable[[], Callable[[], None]], failed: Callable[[BaseException], None], timeout: float
) -> None:
    """Calls `load` on a thread, and then the function that it returns on the running event loop.

    `failed` is called with the exception of either, or with an error if `load` has not ended after `timeout`
    seconds (0 sets no limit). The watchdog of the start that follows begins at 0."""
    loop = asyncio.get_running_loop()

    def stalled() -> None:
        from snapcap.service.watch import StalledError  # noqa: PLC0415 - needed by failures only

        failed(StalledError(f"the imports of the start have not ended after {timeout:g} s (--start-timeout)"))

    limit = loop.call_later(timeout, stalled) if timeout else None

    def loaded(begin: Callable[[], None]) -> None:
        if limit is not None:
            limit.cancel()
        try:
            begin()
        except Exception as error:
            failed(error)

    def run() -> None:
        try:
            begin = load()
        except BaseException as error:  # a compiled module may raise anything while it is loaded
            failed(error)
            return
        with suppress(RuntimeError):  # the event loop is closed, because a signal came first
            loop.call_soon_threadsafe(loaded, begin)

    threading.Thread(target=run, name="imports", daemon=True).start()


# Seconds after which a thread gives Python's lock to another that waits for it. Threads parse bodies, and the event
# loop may wait for the lock several times for one message: with Python's own 0.005 that was 100 ms.
SWITCH_INTERVAL_S = 0.0005

# Starts the model: called on the event loop once /livez answers. The start runs in other threads or processes; the
# call returns at once, with a function to call when the server has ended. The last argument ends the server, for a
# start that failed.
StartModel: TypeAlias = Callable[[Settings, Services, Callable[[], None]], Callable[[], object]]


def assemble(settings: Settings, timeline: Timeline, models: int = 0) -> Services:
    """Makes the objects that the parts of the process share. Starts none of them. `models`: number of models that
    may wake and leave; the captioner is the first one's."""
    # Without this call every counter and histogram has a further series with the time of its creation, which
    # process_start_time_seconds tells already. The library's switch is for the whole process.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    metrics = Metrics(registry, CollectorRegistry() if models else None)
    readiness = Readiness(lambda: timeline.current() or "starting")
    status = StartupStatus()
    captioner = Captioner(settings.queue, readiness, metrics, timeline)
    started = StartupCollector(timeline, status, readiness, lambda: captioner.model_name, of_model=not models)
    registry.register(started)
    register_process_collectors(registry)
    return Services(captioner, readiness, metrics, registry, timeline, status)


def run(
    settings: Settings,
    listeners: Sequence[socket.socket],
    keys: ApiKeys | None,
    timeline: Timeline,
    load_start: Callable[[], StartModel],
    models: int = 0,
) -> int:
    """Serves until a signal or a failure. Returns the exit status of `Readiness`.

    `listeners` are the sockets; a second socket answers /metrics, and the first then does not. `keys`, if given,
    are the keys of which a client must send one. `load_start` imports the modules of the start, in a thread.
    `models`: see `assemble`."""
    # The port is the one that the system chose, if the setting is 0.
    http = replace(settings.http, port=listeners[0].getsockname()[1])
    settings = replace(settings, http=http)
    services = assemble(settings, timeline, models)
    limits = body_limits(settings.limits, settings.images.decode_threads, services.metrics)
    application = create_operations_app(services, settings.http, keys)
    exits = ExitStack()

    def failed(error: BaseException) -> None:
        try:
            from snapcap.service.server.start_result import StartResult  # noqa: PLC0415 - needed by failures only

            StartResult(settings, services, server.begin_exit).failed(error)
        except Exception:  # the failed import may be of a module that the report needs too
            _logger.error("failed", exc_info=error)
            services.readiness.fail("the start failed: the log has the cause")
            server.begin_exit()

    def load() -> Callable[[], None]:
        from snapcap.service.api.captioning_apis import add_captioning_apis  # noqa: PLC0415 - once /livez answers

        tracing = open_tracing(os.environ)
        if tracing is not None:
            application.trace(tracing)
            exits.callback(tracing.close)
        start = load_start()

        def begin() -> None:
            add_captioning_apis(application, services, limits)
            exits.callback(start(settings, services, server.begin_exit))

        return begin

    def on_live() -> None:
        timeline.mark("live")
        for each, what in zip(listeners, ("listening", "metrics"), strict=False):
            host, port = each.getsockname()[:2]
            _logger.info(what, extra={"fields": {"host": host, "port": port}})
        import_in_background(load, failed, settings.watchdog.start_timeout)

    closed, origins = services.metrics.connection_closed, frozenset(settings.http.origins)
    connections = Connections(connection_limits(settings.limits, models), closed, origins)
    services.metrics.connections.set_function(lambda: len(connections.all))
    app: ASGIApp = application
    for metrics_listener in listeners[1:]:
        app = PortSwitch(metrics_listener.getsockname()[1], create_metrics_app(services), app)
    server = Server(app, settings.http, services.readiness, on_live, connections)
    with exits:
        exits.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        server.run(sockets=list(listeners))
    services.captioner.close()
    limits.pool.shutdown(wait=False, cancel_futures=True)
    _logger.info("stopped")
    if services.readiness.error is not None:
        print(f"snapcap: {services.readiness.error}", file=sys.stderr)
    return services.readiness.exit_status
