"""Builds what a server consists of, and runs it on a bound socket.

What answers probes is imported first. The rest follows in a thread, while they are answered."""

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client import CollectorRegistry, disable_created_metrics
from starlette.types import ASGIApp

from snapcap.service.api.app import (
    Application,
    Exposure,
    PortSwitch,
    Services,
    create_metrics_app,
    create_operations_app,
)
from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.captioning.captioner import Captioner, CaptionLimits
from snapcap.service.config.settings import Settings
from snapcap.service.edge.connections import Connections
from snapcap.service.images.room import decode_memory
from snapcap.service.images.threads import decode_threads
from snapcap.service.readiness import Readiness
from snapcap.service.server.http_limits import body_limits, connection_limits
from snapcap.service.server.late_imports import LateImports
from snapcap.service.server.uvicorn_server import make_server
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.start_metrics import StartupCollector, register_process_collectors
from snapcap.service.telemetry.tracing import open_tracing
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
    from snapcap.service.api.middleware.api_keys import ApiKeys

# Seconds after which a thread gives Python's lock to another that waits for it. Threads parse bodies, and the event
# loop may wait for the lock several times for one message: with Python's own 0.005 that was 100 ms.
SWITCH_INTERVAL_S = 0.0005
_logger = logging.getLogger("snapcap.server")

# Called on the event loop once /livez answers; it goes on elsewhere and returns at once, with what is to be called
# when the server has ended. The last argument ends the server, for a start that failed.
Start: TypeAlias = Callable[[Settings, Services, Callable[[], None]], Callable[[], object]]
AddApis: TypeAlias = Callable[[Application, Services, BodyLimits, Exposure], None]


def assemble(settings: Settings, timeline: Timeline) -> Services:
    """The shared objects, none of them started."""
    # Of every counter and histogram a series more, which says what process_start_time_seconds does. The library has
    # one switch for the process.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    readiness = Readiness(lambda: timeline.current() or "starting")
    status = StartupStatus()
    threads = decode_threads(settings.images.decode_threads)
    limits = CaptionLimits(settings.queue.timeout, settings.queue.size, threads, decode_memory(settings) // threads)
    captioner = Captioner(limits, readiness, metrics, timeline)
    registry.register(StartupCollector(timeline, status, readiness, lambda: captioner.model_name))
    register_process_collectors(registry)
    return Services(captioner, readiness, metrics, registry, timeline, status)


def run(
    settings: Settings,
    listeners: Sequence[socket.socket],
    keys: "ApiKeys | None",
    timeline: Timeline,
    load_start: Callable[[], Start],
) -> int:
    """Serves until it is told to exit. Exit status 1 when the start has failed, else 0.

    `listeners`: a second one has the metrics, which then are only there. `keys`: clients must show one.
    `load_start`: imports what the start needs; called in a thread."""
    # With the port that was found where any was asked for.
    http = replace(settings.http, port=listeners[0].getsockname()[1])
    settings = replace(settings, http=http)
    services = assemble(settings, timeline)
    limits = body_limits(settings.limits, services.metrics)
    exposure = Exposure.of(settings.http, keys, metrics=len(listeners) == 1)
    application = create_operations_app(services, exposure)
    exits = ExitStack()

    def failed(error: BaseException) -> None:
        try:
            from snapcap.service.server.start_result import StartResult  # noqa: PLC0415 - once it has failed

            StartResult(settings, services, server.begin_exit).failed(error)
        except Exception:  # what cannot be imported may be what this needs
            _logger.error("failed", exc_info=error)
            services.readiness.fail("the start failed: the log has the cause")
            server.begin_exit()

    def load() -> tuple[AddApis, Start]:
        from snapcap.service.api.captioning_apis import add_captioning_apis  # noqa: PLC0415 - once /livez answers

        tracing = open_tracing(os.environ)
        if tracing is not None:
            application.trace(tracing)
            exits.callback(tracing.close)
        return add_captioning_apis, load_start()

    def begin(loaded: tuple[AddApis, Start]) -> None:
        add_captioning_apis, start = loaded
        add_captioning_apis(application, services, limits, exposure)
        exits.callback(start(settings, services, server.begin_exit))

    def on_live() -> None:
        timeline.mark("live")
        for each, what in zip(listeners, ("listening", "metrics"), strict=False):
            host, port = each.getsockname()[:2]
            _logger.info(what, extra={"fields": {"host": host, "port": port}})
        LateImports(load, begin, failed, settings.watchdog.start_timeout).start()

    closed, origins = services.metrics.connection_closed, frozenset(settings.http.origins)
    connections = Connections(connection_limits(settings.limits), closed, origins)
    services.metrics.connections.set_function(lambda: len(connections.all))
    app: ASGIApp = application
    for metrics_listener in listeners[1:]:
        app = PortSwitch(metrics_listener.getsockname()[1], create_metrics_app(services), app)
    server = make_server(app, settings.http, services.readiness, on_live, connections)
    with exits:
        exits.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        server.run(sockets=list(listeners))
    services.captioner.close()
    _logger.info("stopped")
    if services.readiness.error is None:
        return 0
    print(f"snapcap: {services.readiness.error}", file=sys.stderr)
    return 1
