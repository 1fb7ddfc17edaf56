"""Answers GET /livez and GET /readyz."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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
        return JSONResponse(body, 200 if readiness.servable else 503)

    return RouteGroup("operation", [Route("/livez", livez), Route("/readyz", readyz)])
