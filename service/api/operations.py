"""Answers the probes GET /livez, GET /readyz and GET /health, and GET /metrics and GET /startup.

`app.py` adds these routes before any page or other API is imported.
"""

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from snapcap.service.captioning.captioner import Captioner, Start
from snapcap.service.errors import InvalidOption
from snapcap.service.http.middleware import note_state
from snapcap.service.http.replies import accepted_types
from snapcap.service.http.routing import RouteGroup
from snapcap.service.readiness import Readiness
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

_BETWEEN_TEXTS_S = 0.25
_LONGEST_ACCEPT = 1024  # the Accept header of Prometheus has less than a third of this length


def health_routes(readiness: Readiness) -> RouteGroup:
    async def livez(request: Request) -> Response:
        """Answers 200 as long as the event loop runs. The answer depends on nothing else."""
        return JSONResponse({"status": "live"})

    async def readyz(request: Request) -> Response:
        """Answers 200 when the server captions images, else 503 with the current phase of the process."""
        body = {"state": readiness.state.value, "phase": readiness.phase()}
        if readiness.error is not None:
            body["error"] = readiness.error
        note_state(request.scope, body["state"], body["phase"])
        return JSONResponse(body, 200 if readiness.servable else 503)

    # In vLLM, TGI and llama.cpp /health says that the model answers, and clients of /health expect the same here.
    routes = [Route("/livez", livez), Route("/readyz", readyz), Route("/health", readyz, name="health")]
    return RouteGroup("operation", routes)


class MetricsText:
    """Renders the metrics on the event loop, at most every 250 ms, as each text takes milliseconds. Requests that
    wait share one text. The text is never older than a request that gets it."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._free = float("-inf")  # when the next text may be rendered
        self._planned: dict[str, asyncio.Task[bytes]] = {}  # by content type; `choose_encoder` returns only a few

    async def render(self, encode: Callable[[CollectorRegistry], bytes], content_type: str) -> bytes:
        planned = self._planned.get(content_type)
        if planned is None:
            planned = asyncio.ensure_future(self._render(encode, content_type))
            self._planned[content_type] = planned
        return await asyncio.shield(planned)  # a cancelled request must not cancel the text for others

    async def _render(self, encode: Callable[[CollectorRegistry], bytes], content_type: str) -> bytes:
        now = self._clock()
        begin = max(now, self._free)
        self._free = begin + _BETWEEN_TEXTS_S
        try:
            if begin > now:
                await asyncio.sleep(begin - now)
        finally:
            del self._planned[content_type]
        return encode(self._registry)


def metrics_routes(registry: CollectorRegistry) -> RouteGroup:
    text = MetricsText(registry)

    async def metrics(request: Request) -> Response:
        """Returns the metrics in the Prometheus text format, or as OpenMetrics if the Accept header asks for it."""
        accept = accepted_types(request)
        encode, content_type = choose_encoder(accept if len(accept) <= _LONGEST_ACCEPT else "")
        return Response(await text.render(encode, content_type), headers={"Content-Type": content_type})

    return RouteGroup("operation", [Route("/metrics", metrics)])


def startup_routes(
    readiness: Readiness, timeline: Timeline, status: StartupStatus, captioner: Captioner
) -> RouteGroup:
    """Returns the route /startup. `captioner`: names the model once the model is loaded."""
    server = Start(readiness, timeline, status)

    async def startup(request: Request) -> Response:
        """Reports the start in seconds since the process was executed. `end` is null while a phase runs.

        With `model=NAME`, the report is of that model's last start, in seconds since it began, and `state` is the
        model's: absent, waking, ready or leaving. A server with several models, or with one that may leave, reports
        the state of each in `models`."""
        asked, *others = request.query_params.getlist("model") or ("",)
        if others:
            raise InvalidOption("model", "be given once")
        model = captioner.named(asked)
        known = model.known
        readiness, timeline, status = server if model.keeper is None or not asked else model.keeper.start
        # `now` is read after all other times, so that no time in the report is later.
        marks, phases, rest = timeline.marks(), timeline.phases(), status.to_dict()
        body = {
            "state": model.state if asked and model.state is not None else readiness.state.value,
            "phase": readiness.phase(),
            "model": model.model_name,
            "family": known.family,
            "tasks": known.tasks,
            "takes_instructions": known.takes_instructions,
            "settings_not_done": known.settings_not_done,
            "now": _seconds(timeline.now()),
            "marks": {name: _seconds(moment) for name, moment in marks.items()},
            "phases": [
                {"name": phase.name, "start": _seconds(phase.start), "end": _seconds(phase.end)} for phase in phases
            ],
            **rest,
            "buckets": [
                {**bucket, "seconds": _seconds(bucket["seconds"]), "start": _seconds(bucket["start"])}
                for bucket in rest["buckets"]
            ],
            # A failed start and a failed warm-up may both have an error. The start comes first: its error is why
            # nothing is served.
            "error": readiness.error or status.state.error,
        }
        if captioner.models:
            body["models"] = {name: each.state for name, each in captioner.models.items()}
        return JSONResponse(body)

    return RouteGroup("operation", [Route("/startup", startup)])


def _seconds(value: float | None) -> float | None:
    """Returns seconds rounded to microseconds."""
    return None if value is None else round(value, 6)
