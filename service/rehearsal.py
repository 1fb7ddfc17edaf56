"""One caption before READY, as a client's: what a request would be the first to do is done by this one."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import Request
from prometheus_client import CollectorRegistry
from starlette.types import Message, Scope

from service.body import BodyLimits
from service.captioner import Captioner, CaptionLimits
from service.decoder import Decoder
from service.metrics import Metrics
from service.readiness import Readiness
from service.rehearsal_picture import picture
from service.request_id import identify
from service.routes.caption import CaptionRoutes
from warmup.timeline import Timeline

if TYPE_CHECKING:
    from service.request import CaptionEngine
    from warmup.prepared import Checkpoint

TIMEOUT_S = 30.0
_BODY = BodyLimits(1 << 20, TIMEOUT_S)


def rehearse(
    engine: "CaptionEngine",
    checkpoint: "Checkpoint",
    decoder: Decoder | None = None,
    run: Callable[[Coroutine[Any, Any, None]], object] = asyncio.run,
) -> None:
    """Send a JPEG through the endpoint of captions, with metrics that nobody reads.

    `decoder` None: a thread decodes. `run`: on which event loop, if not on one of its own.

    Raises what the endpoint raises."""
    metrics = Metrics(CollectorRegistry())
    readiness = Readiness(lambda: "rehearsal")
    readiness.ready()
    captioner = Captioner(CaptionLimits(TIMEOUT_S, 1, 1), readiness, metrics, Timeline(time.monotonic()))
    try:
        captioner.attach(engine, checkpoint.transform, checkpoint.tokenizer, checkpoint.name, decoder)
        run(_ask(CaptionRoutes(captioner, _BODY, metrics), picture()))
    finally:
        captioner.close()


async def _ask(routes: CaptionRoutes, image: bytes) -> None:
    messages: list[Message] = [{"type": "http.request", "body": image, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.get_running_loop().create_future()  # the client stays
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/caption",
        # Two tokens: the first step, and one that follows another.
        "query_string": b"max_new_tokens=2",
        "headers": [(b"content-type", b"image/jpeg"), (b"content-length", b"%d" % len(image))],
    }
    identify(scope)
    request: Any = Request(scope, receive, send)
    response = await routes.caption(request)
    await response(scope, receive, send)
