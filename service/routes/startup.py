"""GET /startup: the start as it happened, in seconds since the process was executed."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.readiness import Readiness
from warmup.status import StartupStatus
from warmup.timeline import Timeline


class StartupRoutes:
    def __init__(self, readiness: Readiness, timeline: Timeline, status: StartupStatus) -> None:
        self._readiness = readiness
        self._timeline = timeline
        self._status = status

    def routes(self) -> list[Route]:
        return [Route("/startup", self.startup)]

    async def startup(self, _request: Request) -> Response:
        """Always 200; `end` is null while a phase runs."""
        body = {
            "state": self._readiness.state.value,
            "phase": self._readiness.phase(),
            "now": round(self._timeline.now(), 4),
            "marks": {name: round(seconds, 4) for name, seconds in self._timeline.marks().items()},
            "phases": [
                {
                    "name": phase.name,
                    "start": round(phase.start, 4),
                    "end": None if phase.end is None else round(phase.end, 4),
                }
                for phase in self._timeline.phases()
            ],
            **self._status.to_dict(),
        }
        # A failed start and a failed warm-up may both have left a sentence; the former is why nothing is served.
        body["error"] = self._readiness.error or self._status.error
        return JSONResponse(body)
