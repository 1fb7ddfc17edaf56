"""Builds the FastAPI application from the routers of all APIs; starts nothing and imports nothing heavy.

FastAPI documents all routes and serves those that are asked for seldom; captions go past it (`routing.py`).
Endpoints return finished responses, so that no reply is validated and serialised a second time. Importing FastAPI
is what the first /livez waits for; another process imports torch meanwhile.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRouter
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.service.api import openapi
from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.api.caption.routes import CaptionRoutes
from snapcap.service.api.huggingface.routes import HuggingFaceRoutes
from snapcap.service.api.middleware.api_keys import ApiKeys
from snapcap.service.api.middleware.authentication import Authentication
from snapcap.service.api.middleware.problem_handler import ProblemHandler
from snapcap.service.api.middleware.request_scope import RequestScope
from snapcap.service.api.openai.image_fetcher import ImageFetcher
from snapcap.service.api.openai.image_url import AllowedHosts
from snapcap.service.api.openai.routes import OpenAIRoutes
from snapcap.service.api.operations.health import health_router
from snapcap.service.api.operations.metrics import metrics_router
from snapcap.service.api.operations.page import page_router
from snapcap.service.api.operations.startup import startup_router
from snapcap.service.api.problems import HUGGING_FACE, OPENAI, V2
from snapcap.service.api.routing import Api, Apis, DirectDispatch
from snapcap.service.api.v2.routes import V2Routes
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.errors import ServiceError
from snapcap.service.readiness import Readiness
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.version import snapcap_version

# FastAPI would look for OpenTelemetry's configuration in the environment, for each request.
_UNTRACED: dict[str, Any] = {
    "telemetry": {"tracing": False, "metrics": False, "logs": False, "operation_spans": False}
}


@dataclass(frozen=True)
class Services:
    """What the routes and the start share."""

    captioner: Captioner
    readiness: Readiness
    metrics: Metrics
    registry: CollectorRegistry
    timeline: Timeline
    status: StartupStatus


@dataclass(frozen=True)
class Exposure:
    """Who may ask for what. `keys` None: everybody; `image_hosts`: of whose images' URLs; `metrics`: they are here,
    and not on a port of their own."""

    keys: ApiKeys | None = None
    image_hosts: tuple[str, ...] = ()
    metrics: bool = True


class Application(FastAPI):
    """FastAPI within what is around every request, and with a document that also holds what FastAPI cannot know."""

    apis: Apis
    keys: bool
    around: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.around(scope, receive, send)

    async def fastapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What has no way of its own."""
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            openapi.complete(super().openapi(), self.apis, self.keys)
        return super().openapi()


def create_app(services: Services, limits: BodyLimits, exposure: Exposure = Exposure()) -> FastAPI:
    """The application over these services."""
    app = Application(
        title="snapcap",
        version=snapcap_version(),
        description="Captions images. X-Request-Id is in every reply. Errors are RFC 9457 problems, but those of "
        "other APIs have the shape that the clients of those APIs know.",
        docs_url=None,  # FastAPI's loads scripts from elsewhere; routes/page.py has one that does not
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        **_UNTRACED,
    )
    apis = Apis()
    handler = ProblemHandler(services.metrics, apis)
    apis.add(app.router)
    routes: list[BaseRoute] = []
    for router, api in _routers(services, limits, exposure, handler):
        app.include_router(router)
        apis.add(router, api)
        routes += router.routes
    app.apis, app.keys = apis, exposure.keys is not None
    app.around = _around(app, routes, services.metrics, handler, exposure.keys)
    return app


def create_metrics_app(services: Services) -> ASGIApp:
    """The application of the port that has the metrics, and nothing else."""
    app = Application(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, **_UNTRACED)
    apis = Apis()
    router = metrics_router(services.registry)
    app.include_router(router)
    apis.add(router)
    app.around = _around(app, (), services.metrics, ProblemHandler(services.metrics, apis), None)
    return app


def _routers(
    services: Services, limits: BodyLimits, exposure: Exposure, handler: ProblemHandler
) -> Iterator[tuple[APIRouter, Api | None]]:
    captioner, readiness = services.captioner, services.readiness
    yield CaptionRoutes(captioner, limits, services.metrics).router(), Api("caption", captions=True)
    yield HuggingFaceRoutes(captioner, limits).router(), Api("huggingface", HUGGING_FACE, captions=True)
    fetcher = ImageFetcher(AllowedHosts(exposure.image_hosts), limits)
    yield OpenAIRoutes(captioner, limits, fetcher, handler).router(), Api("openai", OPENAI, captions=True)
    v2 = V2Routes(captioner, readiness, limits)
    yield v2.probes(), Api("v2_health", V2)
    yield v2.router(), Api("v2", V2, captions=True)
    yield health_router(readiness), None
    yield startup_router(readiness, services.timeline, services.status, lambda: captioner.model_name), None
    if exposure.metrics:
        yield metrics_router(services.registry), None
    yield page_router(exposure.metrics), None


def _around(
    app: Application, routes: Iterable[BaseRoute], metrics: Metrics, handler: ProblemHandler, keys: ApiKeys | None
) -> ASGIApp:
    """What is around every request of an application, the outermost last."""
    for kind in (ServiceError, HTTPException):
        app.add_exception_handler(kind, handler)
    inner: ASGIApp = DirectDispatch(routes, app.fastapi)
    if keys is not None:
        inner = Authentication(inner, keys)
    return RequestScope(inner, metrics, handler)
