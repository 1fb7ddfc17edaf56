"""Answers GET /livez and GET /readyz."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from snapcap.service.api.openapi import reply
from snapcap.service.readiness import Readiness


def health_router(readiness: Readiness) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get("/livez", summary="Whether the process is alive", responses=reply("It is", "Live"))
    async def livez() -> Response:
        """200 as long as the event loop runs; depends on nothing else."""
        return JSONResponse({"status": "live"})

    @router.get(
        "/readyz",
        summary="Whether captions are served",
        responses=reply("They are", "Ready")
        | reply("Not yet, no longer, or the start failed", "Ready", status=503),
    )
    async def readyz() -> Response:
        """200 when captions are served, else 503 with what the process is doing instead."""
        body = {"state": readiness.state.value, "phase": readiness.phase()}
        if readiness.error is not None:
            body["error"] = readiness.error
        return JSONResponse(body, 200 if readiness.servable else 503)

    return router
