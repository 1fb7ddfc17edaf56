"""Answers what monitors ask: GET /livez, GET /readyz, which is GET /health too, and GET /metrics.

`app.py` has them before any page or API is imported.
"""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from snapcap.service.api.middleware.request_log import note_state
from snapcap.service.api.routing import RouteGroup
from snapcap.service.readiness import Readiness


def health_routes(readiness: Readiness) -> RouteGroup:
    async def livez(request: Request) -> Response:
        """200 as long as the event loop runs; depends on nothing else."""
        return JSONResponse({"status": "live"})

    async def readyz(request: Request) -> Response:
        """200 when captions are served, else 503 with what the process is doing instead."""
        body = {"state": readiness.state.value, "phase": readiness.phase()}
        if readiness.error is not None:
            body["error"] = readiness.error
        note_state(request.scope, body["state"], body["phase"])
        return JSONResponse(body, 200 if readiness.servable else 503)

    # vLLM, TGI and llama.cpp mean by /health that the model answers, and so do who probes it there.
    routes = [Route("/livez", livez), Route("/readyz", readyz), Route("/health", readyz, name="health")]
    return RouteGroup("operation", routes)


def metrics_routes(registry: CollectorRegistry) -> RouteGroup:
    async def metrics(request: Request) -> Response:
        """The Prometheus text format, or OpenMetrics for a scraper that asks for it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    return RouteGroup("operation", [Route("/metrics", metrics)])
