"""Answers GET /metrics."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from snapcap.service.api.routing import RouteGroup


def metrics_routes(registry: CollectorRegistry) -> RouteGroup:
    async def metrics(request: Request) -> Response:
        """The Prometheus text format, or OpenMetrics for a scraper that asks for it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    return RouteGroup("operation", [Route("/metrics", metrics)])
