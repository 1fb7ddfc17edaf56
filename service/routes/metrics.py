"""GET /metrics in the Prometheus text format, or OpenMetrics for a scraper that asks for it."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


class MetricsRoutes:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def routes(self) -> list[Route]:
        return [Route("/metrics", self.metrics)]

    async def metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"Content-Type": content_type})
