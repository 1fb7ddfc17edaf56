"""GET /livez and GET /readyz."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.readiness import Readiness


class HealthRoutes:
    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    def routes(self) -> list[Route]:
        return [Route("/livez", self.livez), Route("/readyz", self.readyz)]

    async def livez(self, _request: Request) -> Response:
        """200 as long as the event loop runs; depends on nothing else."""
        return JSONResponse({"status": "live"})

    async def readyz(self, _request: Request) -> Response:
        """200 when captions are served, else 503 with what the process is doing instead."""
        readiness = self._readiness
        body = {"state": readiness.state.value, "phase": readiness.phase()}
        if readiness.error is not None:
            body["error"] = readiness.error
        return JSONResponse(body, 200 if readiness.servable else 503)
