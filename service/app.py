"""The ASGI application: routes over what is handed in. It starts nothing and imports nothing heavy.

Starlette's router alone, without FastAPI: importing FastAPI and pydantic takes twice as long as everything else
up to the first /livez, and bodies in three forms need a hand-written description either way (`openapi.py`).
"""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.routing import Router

from service.body import BodyLimits
from service.captioner import Captioner
from service.metrics import Metrics
from service.readiness import Readiness
from service.request_scope import RequestScope
from service.routes.caption import CaptionRoutes
from service.routes.health import HealthRoutes
from service.routes.metrics import MetricsRoutes
from service.routes.openapi import OpenApiRoutes
from service.routes.startup import StartupRoutes
from warmup.status import StartupStatus
from warmup.timeline import Timeline

_WORK = frozenset({"caption", "captions"})


@dataclass(frozen=True)
class Services:
    """What the routes and the start share."""

    captioner: Captioner
    readiness: Readiness
    metrics: Metrics
    registry: CollectorRegistry
    timeline: Timeline
    status: StartupStatus


def create_app(services: Services, limits: BodyLimits) -> RequestScope:
    """The application over these services."""
    routes = [
        *HealthRoutes(services.readiness).routes(),
        *CaptionRoutes(services.captioner, limits, services.metrics).routes(),
        *StartupRoutes(services.readiness, services.timeline, services.status).routes(),
        *MetricsRoutes(services.registry).routes(),
        *OpenApiRoutes().routes(),
    ]
    # "/v1/caption" is "caption" in metrics.
    apis = {route.path: route.path.removeprefix("/v1").strip("/") for route in routes}
    router = Router(routes, redirect_slashes=False)
    return RequestScope(router, services.metrics, apis, _WORK)
