"""Builds the ASGI application from the routes and the middleware. Starts no thread and no process.

The application answers probes as soon as the routes of the operations are added; the other APIs are imported after
that. FastAPI writes the OpenAPI document from the routes and is imported on the first request for the document.
"""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.models.dataclass import dataclass
from snapcap.service.api.operations import health_routes, metrics_routes, startup_routes
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.access import EVERY_HOST, ApiKeys, Guard
from snapcap.service.http.middleware import ProblemHandler, RequestScope
from snapcap.service.http.routing import Dispatch
from snapcap.service.readiness import Readiness
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
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


class Application:
    """Serves groups of routes as an ASGI application, inside the middleware. `keys`: valid API keys; None: requests
    need no key."""

    def __init__(self, metrics: Metrics, http: HttpSettings, keys: ApiKeys | None) -> None:
        self.http = http
        self.keys = keys
        self.routes = Dispatch()
        self.handler = ProblemHandler(metrics, self.routes)
        self._scope = RequestScope(Guard(self.routes, http, keys), metrics, self.handler, http.root_path)
        self._around: ASGIApp = self._scope
        if http.origins:
            from snapcap.service.http.cross_origin import CrossOrigin  # noqa: PLC0415 - few servers have one

            self._around = CrossOrigin(self._around, http.origins, metrics)

    def trace(self, tracing: "OtelTracing | None") -> None:
        """Sets the tracing of caption requests from now on. None turns it off."""
        self._scope.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._around(scope, receive, send)


def create_operations_app(services: Services, http: HttpSettings, keys: ApiKeys | None) -> Application:
    """Returns an application with /livez, /readyz, /health and /startup, and with /metrics unless it has a port of
    its own."""
    app = Application(services.metrics, http, keys)
    app.routes.add(
        health_routes(services.readiness),
        startup_routes(services.readiness, services.timeline, services.status, services.captioner),
    )
    if http.metrics_port is None:
        app.routes.add(metrics_routes(services.registry))
    return app


def create_metrics_app(services: Services) -> Application:
    """Returns the application of the metrics port, with /metrics only."""
    app = Application(services.metrics, HttpSettings(hosts=(EVERY_HOST,)), None)
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
