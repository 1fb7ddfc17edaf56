"""Answers GET /metrics."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def metrics_router(registry: CollectorRegistry) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_description="The metrics",
        response_class=PlainTextResponse,
        responses={200: {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}},
    )
    async def metrics(request: Request) -> Response:
        """The Prometheus text format, or OpenMetrics for a scraper that asks for it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    return router
