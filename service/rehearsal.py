"""One caption before READY, as a client's: what a request would be the first to do is done by this one."""

import asyncio
import io
import time
from typing import TYPE_CHECKING, Any

from fastapi import Request
from PIL import Image
from prometheus_client import CollectorRegistry
from starlette.types import Message, Scope

from service.body import BodyLimits
from service.captioner import Captioner, CaptionLimits
from service.metrics import Metrics
from service.readiness import Readiness
from service.request_id import identify
from service.routes.caption import CaptionRoutes
from warmup.timeline import Timeline

if TYPE_CHECKING:
    from service.request import CaptionEngine
    from warmup.prepared import Checkpoint

TIMEOUT_S = 30.0
SIZE = (500, 375)
_BODY = BodyLimits(1 << 20, TIMEOUT_S)


def rehearse(engine: "CaptionEngine", checkpoint: "Checkpoint") -> None:
    """Send a JPEG through the endpoint of captions, on an event loop of its own and with metrics that nobody reads.

    Raises what the endpoint raises."""
    metrics = Metrics(CollectorRegistry())
    readiness = Readiness(lambda: "rehearsal")
    readiness.ready()
    captioner = Captioner(CaptionLimits(TIMEOUT_S, 1, 1), readiness, metrics, Timeline(time.monotonic()))
    try:
        captioner.attach(engine, checkpoint.transform, checkpoint.tokenizer, checkpoint.name)
        asyncio.run(_ask(CaptionRoutes(captioner, _BODY, metrics), picture()))
    finally:
        captioner.close()


def picture() -> bytes:
    """A JPEG of ``SIZE``, as clients send them."""
    stream = io.BytesIO()
    Image.linear_gradient("L").resize(SIZE).convert("RGB").save(stream, "JPEG")
    return stream.getvalue()


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
