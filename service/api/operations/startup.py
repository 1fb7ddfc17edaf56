"""Answers GET /startup."""

import os
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from snapcap.service.api.routing import RouteGroup
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.errors import InvalidOption
from snapcap.service.readiness import Readiness
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

_FORMATS = ("json", "trace")


def startup_routes(
    readiness: Readiness, timeline: Timeline, status: StartupStatus, captioner: Captioner
) -> RouteGroup:
    """Returns the route /startup. `captioner`: names the model once the model is loaded."""

    async def startup(request: Request) -> Response:
        """The start as it happened, in seconds since the process was executed. `end` is null while a phase runs.
        As a trace, in microseconds: phases on as many tracks as ran at once, the warm-up of each bucket within its
        phase, and the moments as instants."""
        form = _format(request)
        # `now` is read after all other times, so that no time in the report is later.
        marks, phases, rest = timeline.marks(), timeline.phases(), status.to_dict()
        body = {
            "state": readiness.state.value,
            "phase": readiness.phase(),
            "model": captioner.model_name,
            "family": captioner.model_family,
            "tasks": [*captioner.tasks],
            "takes_instructions": captioner.takes_instructions,
            "settings_not_done": [*captioner.settings_not_done],
            "now": _seconds(timeline.now()),
            "marks": {name: _seconds(moment) for name, moment in marks.items()},
            "phases": [
                {"name": phase.name, "start": _seconds(phase.start), "end": _seconds(phase.end)} for phase in phases
            ],
            **rest,
            "buckets": [_bucket(bucket) for bucket in rest["buckets"]],
            # A failed start and a failed warm-up may both have an error. The start comes first: its error is why
            # nothing is served.
            "error": readiness.error or status.error,
        }
        if form == "trace":
            from snapcap.service.telemetry.trace import chrome_trace  # noqa: PLC0415 - few requests ask for a trace

            return JSONResponse(chrome_trace(body, os.getpid()))
        return JSONResponse(body)

    return RouteGroup("operation", [Route("/startup", startup)])


def _format(request: Request) -> str:
    """Returns the value of the query parameter `format`. Raises InvalidOption."""
    given = request.query_params.getlist("format") or _FORMATS[:1]
    if len(given) > 1:
        raise InvalidOption("format", "be given once")
    if given[0] not in _FORMATS:
        raise InvalidOption("format", f"be one of {', '.join(_FORMATS)}")
    return given[0]


def _bucket(bucket: dict[str, Any]) -> dict[str, Any]:
    return {**bucket, "seconds": _seconds(bucket["seconds"]), "start": _seconds(bucket["start"])}


def _seconds(value: float | None) -> float | None:
    """Returns seconds rounded to microseconds, the unit of a trace."""
    return None if value is None else round(value, 6)
