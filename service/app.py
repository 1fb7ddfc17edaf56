"""The FastAPI application: routers over what is handed in. It starts nothing and imports nothing heavy.

FastAPI routes, handles exceptions and documents. The response models are documentation only: endpoints return
finished responses, so that no reply is validated and serialised a second time. Importing FastAPI comes after the
bind and before torch, and delays the first /livez by about a seventh of what importing torch takes.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRouter
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.routing import Route

from service import openapi
from service.body import BodyLimits
from service.captioner import Captioner
from service.errors import EngineFailed, ServiceError
from service.metrics import Metrics
from service.problem_handler import ProblemHandler
from service.readiness import Readiness
from service.request_scope import RequestScope
from service.routes.caption import CaptionRoutes
from service.routes.health import health_router
from service.routes.metrics import metrics_router
from service.routes.page import page_router
from service.routes.startup import startup_router
from warmup.status import StartupStatus
from warmup.timeline import Timeline
from warmup.version import snapcap_version

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


class Application(FastAPI):
    """FastAPI with a document that also holds what FastAPI cannot know."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            openapi.complete(super().openapi())
        return super().openapi()


def create_app(services: Services, limits: BodyLimits) -> FastAPI:
    """The application over these services."""
    handler = ProblemHandler(services.metrics)
    app = Application(
        title="snapcap",
        version=snapcap_version(),
        description="Captions images. Errors are RFC 9457 problems; X-Request-Id is in every reply.",
        docs_url=None,  # FastAPI's loads scripts from elsewhere; routes/page.py has one that does not
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={ServiceError: handler, HTTPException: handler},
        responses=openapi.problems(EngineFailed),
        generate_unique_id_function=lambda route: route.name,
    )
    routers = [
        CaptionRoutes(services.captioner, limits, services.metrics).router(),
        health_router(services.readiness),
        startup_router(
            services.readiness, services.timeline, services.status, lambda: services.captioner.model_name
        ),
        metrics_router(services.registry),
        page_router(),
    ]
    for router in routers:
        app.include_router(router)
    app.add_middleware(
        RequestScope, metrics=services.metrics, handler=handler, apis=_apis(app, routers), work=_WORK
    )
    return app


def _apis(app: FastAPI, routers: list[APIRouter]) -> dict[str, str]:
    """The label in metrics of each path: "/v1/caption" is "caption", "/" is "page"."""
    routes = [route for router in (app.router, *routers) for route in router.routes if isinstance(route, Route)]
    return {route.path: route.path.removeprefix("/v1").strip("/") or "page" for route in routes}
