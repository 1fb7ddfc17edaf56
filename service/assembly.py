"""Builds what a server consists of, and runs it on a bound socket."""

import logging
import socket
from contextlib import ExitStack

from prometheus_client import CollectorRegistry

from service.app import Services, create_app
from service.body import BodyLimits
from service.captioner import Captioner, CaptionLimits
from service.config import Settings
from service.metrics import Metrics
from service.readiness import Readiness
from service.serve import Start
from service.server import make_server
from service.startup_collector import StartupCollector, register_process_collectors
from warmup.status import StartupStatus
from warmup.timeline import Timeline

_logger = logging.getLogger("snapcap.server")


def assemble(settings: Settings, timeline: Timeline) -> Services:
    """The shared objects, none of them started."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.queue_capacity.set(settings.queue.size)
    readiness = Readiness(lambda: timeline.current() or "starting")
    status = StartupStatus()
    limits = CaptionLimits(settings.queue.timeout, settings.queue.size, settings.images.decode_threads)
    captioner = Captioner(limits, readiness, metrics, timeline)
    registry.register(StartupCollector(timeline, status, readiness, lambda: captioner.model_name))
    register_process_collectors(registry)
    return Services(captioner, readiness, metrics, registry, timeline, status)


def run(settings: Settings, listener: socket.socket, timeline: Timeline, start: Start) -> int:
    """Serves until it is told to exit. Exit status 1 when the start has failed, else 0."""
    services = assemble(settings, timeline)
    host, port = listener.getsockname()[:2]

    exits = ExitStack()

    def on_live() -> None:
        timeline.mark("live")
        _logger.info("listening", extra={"fields": {"host": host, "port": port}})
        exits.callback(start(settings, services, server.begin_exit))

    limits = BodyLimits(settings.http.max_body_bytes, settings.http.body_timeout)
    server = make_server(create_app(services, limits), settings.http, services.readiness, on_live)
    with exits:
        server.run(sockets=[listener])
    services.captioner.close()
    _logger.info("stopped")
    return 0 if services.readiness.error is None else 1
