"""GET /openapi.json."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class OpenApiRoutes:
    def routes(self) -> list[Route]:
        return [Route("/openapi.json", self.document)]

    async def document(self, _request: Request) -> Response:
        # Here, because few processes are ever asked, and none may start later for it.
        from service.openapi import document  # noqa: PLC0415

        return JSONResponse(document())
