"""Answers the probes GET /livez, GET /readyz and GET /health, and GET /metrics.

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

from snapcap.service.api.middleware.request_log import note_state
from snapcap.service.api.routing import RouteGroup
from snapcap.service.readiness import Readiness

_BETWEEN_TEXTS_S = 0.25
_LONGEST_ACCEPT = 1024  # the Accept header of Prometheus has less than a third of this length


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
        """The Prometheus text format, or OpenMetrics for a scraper that asks for it."""
        accept = request.headers.get("accept", "")
        encode, content_type = choose_encoder(accept if len(accept) <= _LONGEST_ACCEPT else "")
        return Response(await text.render(encode, content_type), headers={"Content-Type": content_type})

    return RouteGroup("operation", [Route("/metrics", metrics)])
