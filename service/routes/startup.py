"""GET /startup."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from service.readiness import Readiness
from service.schemas import Startup
from warmup.status import StartupStatus
from warmup.timeline import Timeline


def startup_router(readiness: Readiness, timeline: Timeline, status: StartupStatus) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get(
        "/startup", summary="The start by phase", response_model=Startup, response_description="The timeline"
    )
    async def startup() -> Response:
        """The start as it happened, in seconds since the process was executed. `end` is null while a phase runs."""
        body = {
            "state": readiness.state.value,
            "phase": readiness.phase(),
            "now": round(timeline.now(), 4),
            "marks": {name: round(seconds, 4) for name, seconds in timeline.marks().items()},
            "phases": [
                {
                    "name": phase.name,
                    "start": round(phase.start, 4),
                    "end": None if phase.end is None else round(phase.end, 4),
                }
                for phase in timeline.phases()
            ],
            **status.to_dict(),
        }
        # A failed start and a failed warm-up may both have left a sentence; the former is why nothing is served.
        body["error"] = readiness.error or status.error
        return JSONResponse(body)

    return router
