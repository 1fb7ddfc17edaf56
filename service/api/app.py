"""Builds the ASGI application from the routes and the middleware. Starts no thread and no process.

The application answers probes as soon as the routes of the operations are added; the other APIs are imported after
that. FastAPI writes the OpenAPI document from the routes and is imported on the first request for the document.
"""

import os
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.models.dataclass import dataclass
from snapcap.service.api.operations import health_routes, metrics_routes, startup_routes
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.http.access import EVERY_HOST, Guard
from snapcap.service.http.middleware import ProblemHandler, RequestScope
from snapcap.service.http.routing import Dispatch
from snapcap.service.readiness import Readiness
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
    from snapcap.service.config.settings import HttpSettings
    from snapcap.service.http.access import ApiKeys
    from snapcap.service.telemetry.otel import OtelTracing


@dataclass(frozen=True)
class Services:
    """Holds the objects that the routes and the start share."""

    captioner: Captioner
    readiness: Readiness
    metrics: Metrics
    registry: CollectorRegistry
    timeline: Timeline
    status: StartupStatus


@dataclass(frozen=True)
class Exposure:
    """Holds the settings that decide which requests are allowed.

    `keys`: valid API keys; None: no key is needed. `image_hosts`: hosts from which image URLs may be fetched.
    `metrics`: the application serves /metrics; False: /metrics has a port of its own. `continue_text`: the text of
    a chat message is the beginning of the caption. `origins`: web origins whose pages may send requests.
    `root_path`: prefix of all paths behind a proxy. `hosts`: host names accepted besides the server's own; None:
    any name."""

    keys: "ApiKeys | None" = None
    image_hosts: tuple[str, ...] = ()
    metrics: bool = True
    continue_text: bool = False
    origins: tuple[str, ...] = ()
    root_path: str = ""
    hosts: tuple[str, ...] | None = None

    @classmethod
    def of(cls, http: "HttpSettings", keys: "ApiKeys | None", *, metrics: bool = True) -> "Exposure":
        """Returns the exposure that the settings describe."""
        continue_text = http.chat_text == "continue"
        # The host check stops pages that use DNS rebinding. They have no API key, so a server with keys needs no
        # check.
        open_to_all = EVERY_HOST in http.hosts or (keys is not None and not http.hosts)
        hosts = None if open_to_all else (*http.hosts, http.host.lower(), os.uname().nodename.lower())
        return cls(keys, http.image_hosts, metrics, continue_text, http.origins, http.root_path, hosts)


class Application:
    """Serves groups of routes as an ASGI application, inside the middleware."""

    def __init__(self, metrics: Metrics, exposure: Exposure) -> None:
        origins = exposure.origins
        self.routes = Dispatch()
        self.handler = ProblemHandler(metrics, self.routes)
        inner = Guard(self.routes, exposure.keys, origins, exposure.hosts)
        self._scope = RequestScope(inner, metrics, self.handler, exposure.root_path)
        self._around: ASGIApp = self._scope
        if origins:
            from snapcap.service.http.cross_origin import CrossOrigin  # noqa: PLC0415 - few servers have one

            self._around = CrossOrigin(self._around, origins, metrics)

    def trace(self, tracing: "OtelTracing | None") -> None:
        """Sets the tracing of caption requests from now on. None turns it off."""
        self._scope.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._around(scope, receive, send)


def create_operations_app(services: Services, exposure: Exposure) -> Application:
    """Returns an application with /livez, /readyz, /health and /startup, and with /metrics unless it has a port of
    its own."""
    app = Application(services.metrics, exposure)
    app.routes.add(
        health_routes(services.readiness),
        startup_routes(services.readiness, services.timeline, services.status, services.captioner),
    )
    if exposure.metrics:
        app.routes.add(metrics_routes(services.registry))
    return app


def create_metrics_app(services: Services) -> Application:
    """Returns the application of the metrics port, with /metrics only."""
    app = Application(services.metrics, Exposure())
    app.routes.add(metrics_routes(services.registry))
    app.routes.complete = True
    return app


class PortSwitch:
    """Passes requests on `port` to the application `there`, and all others to `elsewhere`. An ASGI application."""

    def __init__(self, port: int, there: ASGIApp, elsewhere: ASGIApp) -> None:
        self._port = port
        self._there = there
        self._elsewhere = elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The address of the server's socket: the Host header comes from the client and proves nothing.
        here = scope.get("server") or (None, None)
        app = self._there if here[1] == self._port else self._elsewhere
        await app(scope, receive, send)
