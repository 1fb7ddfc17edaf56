"""Answers HTTP requests: puts the routes together with what surrounds every request. It starts nothing.

Probes are answered as soon as the operations are there, the import of the other APIs follows; FastAPI, which writes
the OpenAPI document from the routes, is imported when that is first asked for.
"""

import os
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.models.dataclass import dataclass
from snapcap.service.api.middleware.authentication import Authentication
from snapcap.service.api.middleware.origins import EVERY_HOST, PageGuard
from snapcap.service.api.middleware.problem_handler import ProblemHandler
from snapcap.service.api.middleware.request_scope import RequestScope
from snapcap.service.api.operations.monitoring import health_routes, metrics_routes
from snapcap.service.api.operations.startup import startup_routes
from snapcap.service.api.routing import Apis, Dispatch, RouteGroup
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.readiness import Readiness
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
    from snapcap.service.api.bodies.body import BodyLimits
    from snapcap.service.api.middleware.api_keys import ApiKeys
    from snapcap.service.config.http_settings import HttpSettings
    from snapcap.service.telemetry.tracing import Tracing


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
    """Who may ask for what. `keys` None: everybody; `image_hosts`: of whose images' URLs; `metrics`: they are here,
    and not on a port of their own; `continue_text`: the text of a chat is the beginning of the caption; `origins`:
    whose pages may ask from a browser; `root_path`: of all paths, where a proxy serves them under one; `hosts`: by
    which names the server may be reached besides its own, None: any."""

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
        # Where clients show a key, a page that reaches the server by a name of its own has none.
        open_to_all = EVERY_HOST in http.hosts or (keys is not None and not http.hosts)
        hosts = None if open_to_all else (*http.hosts, http.host.lower(), os.uname().nodename.lower())
        return cls(keys, http.image_hosts, metrics, continue_text, http.origins, http.root_path, hosts)


class Application:
    """ASGI application over groups of routes, within what is around every request."""

    def __init__(self, metrics: Metrics, exposure: Exposure = Exposure()) -> None:  # noqa: B008 - frozen
        keys, origins = exposure.keys, exposure.origins
        self.groups: list[RouteGroup] = []
        self.apis = Apis()
        self.handler = ProblemHandler(metrics, self.apis)
        self._dispatch = Dispatch(self.apis)
        inner: ASGIApp = self._dispatch if keys is None else Authentication(self._dispatch, keys)
        inner = PageGuard(inner, origins, exposure.hosts)
        self._scope = RequestScope(inner, metrics, self.handler, exposure.root_path)
        self._around: ASGIApp = self._scope
        if origins:
            from snapcap.service.api.middleware.cross_origin import CrossOrigin  # noqa: PLC0415 - few servers have one

            self._around = CrossOrigin(self._around, origins, metrics)

    def add(self, *groups: RouteGroup) -> None:
        for group in groups:
            self.groups.append(group)
            self._dispatch.add(group)

    def complete(self) -> None:
        """Notes that all groups are there. A path without a route is not found from now on, not "not ready"."""
        self._dispatch.complete = True

    def trace(self, tracing: "Tracing | None") -> None:
        """Traces requests that caption from now on, unless `tracing` is None."""
        self._scope.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._around(scope, receive, send)


def create_operations_app(services: Services, exposure: Exposure = Exposure()) -> Application:  # noqa: B008 - frozen
    """What answers /livez, /readyz, /health, /startup and, unless they have a port of their own, /metrics."""
    app = Application(services.metrics, exposure)
    app.add(
        health_routes(services.readiness),
        startup_routes(services.readiness, services.timeline, services.status, services.captioner),
    )
    if exposure.metrics:
        app.add(metrics_routes(services.registry))
    return app


def create_app(services: Services, limits: "BodyLimits", exposure: Exposure = Exposure()) -> Application:  # noqa: B008 - frozen
    """The whole application over these services."""
    from snapcap.service.api.captioning_apis import add_captioning_apis  # noqa: PLC0415 - for those who want both at once

    app = create_operations_app(services, exposure)
    add_captioning_apis(app, services, limits, exposure)
    return app


def create_metrics_app(services: Services) -> Application:
    """The application of the port that has the metrics, and nothing else."""
    app = Application(services.metrics)
    app.add(metrics_routes(services.registry))
    app.complete()
    return app


class PortSwitch:
    """ASGI application: what came to `port` is for `there`, the rest for `elsewhere`."""

    def __init__(self, port: int, there: ASGIApp, elsewhere: ASGIApp) -> None:
        self._port = port
        self._there = there
        self._elsewhere = elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The server's end of the connection, whatever the client says in Host.
        here = scope.get("server") or (None, None)
        app = self._there if here[1] == self._port else self._elsewhere
        await app(scope, receive, send)
