"""Answers GET /startup, as JSON or as a Chrome trace."""

import os
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from snapcap.service.api.openapi import problems, reply
from snapcap.service.errors import InvalidOption
from snapcap.service.readiness import Readiness
from snapcap.service.telemetry.trace import chrome_trace
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

_FORMATS = ("json", "trace")
_FORMAT = {
    "name": "format",
    "in": "query",
    "description": "json: as described here. trace: a Chrome trace, which ui.perfetto.dev opens.",
    "schema": {"type": "string", "enum": list(_FORMATS), "default": _FORMATS[0]},
}


def startup_router(
    readiness: Readiness, timeline: Timeline, status: StartupStatus, model_name: Callable[[], str | None]
) -> APIRouter:
    """`model_name` gives the name of the model once it is loaded."""
    router = APIRouter(tags=["operation"])

    @router.get(
        "/startup",
        summary="The start by phase",
        responses=reply("The timeline", "Startup", "Trace") | problems(InvalidOption),
        openapi_extra={"parameters": [_FORMAT]},
    )
    async def startup(request: Request) -> Response:
        """The start as it happened, in seconds since the process was executed. `end` is null while a phase runs.
        As a trace, in microseconds: phases on as many tracks as ran at once, the warm-up of each bucket within its
        phase, and the moments as instants."""
        form = _format(request)
        # Times first, `now` last: nothing in the report is later than it.
        marks, phases, rest = timeline.marks(), timeline.phases(), status.to_dict()
        body = {
            "state": readiness.state.value,
            "phase": readiness.phase(),
            "model": model_name(),
            "now": _seconds(timeline.now()),
            "marks": {name: _seconds(moment) for name, moment in marks.items()},
            "phases": [
                {"name": phase.name, "start": _seconds(phase.start), "end": _seconds(phase.end)} for phase in phases
            ],
            **rest,
            "buckets": [_bucket(bucket) for bucket in rest["buckets"]],
            # A failed start and a failed warm-up may both have left one; the former is why nothing is served.
            "error": readiness.error or status.error,
        }
        return JSONResponse(chrome_trace(body, os.getpid()) if form == "trace" else body)

    return router


def _format(request: Request) -> str:
    """Raises InvalidOption."""
    given = request.query_params.getlist("format") or _FORMATS[:1]
    if len(given) > 1:
        raise InvalidOption("format", "be given once")
    if given[0] not in _FORMATS:
        raise InvalidOption("format", f"be one of {', '.join(_FORMATS)}")
    return given[0]


def _bucket(bucket: dict[str, Any]) -> dict[str, Any]:
    return {**bucket, "seconds": _seconds(bucket["seconds"]), "start": _seconds(bucket["start"])}


def _seconds(value: float | None) -> float | None:
    """To the microsecond, which is what a trace holds."""
    return None if value is None else round(value, 6)
