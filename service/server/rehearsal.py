"""Sends caption requests through the endpoint before READY, so that no client's request is the first and slow."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import Message, Scope

from snapcap.service.api.answers import Answers
from snapcap.service.api.caption import CaptionRoutes
from snapcap.service.api.image_fetcher import ImageFetcher
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.captioning.model_defaults import ModelDefaults
from snapcap.service.config.settings import QueueSettings
from snapcap.service.engine.request import CaptionEngine, CaptionRequest, Completion, Limits
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.http.middleware import ProblemHandler, identify
from snapcap.service.http.routing import Dispatch
from snapcap.service.images.decode import DecodedImage, EncodedImage, ImageDecoder
from snapcap.service.images.parent import picture
from snapcap.service.ipc.shared_pixels import Slots
from snapcap.service.readiness import Readiness
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
    from snapcap.warmup.plan.checkpoint import Checkpoint

TIMEOUT_S = 30.0
_BODY = BodyLimits(1 << 20, TIMEOUT_S)


def rehearse(
    engine: CaptionEngine,
    checkpoint: "Checkpoint",
    image_decoder: ImageDecoder,
    run: Callable[[Coroutine[Any, Any, None]], object],
    times: int = 1,
) -> None:
    """Sends a JPEG through the endpoint of captions, `times` times at once. Metrics do not count it.

    `image_decoder` decodes the JPEG. `run` runs the requests on an event loop. Raises the exceptions of the
    endpoint."""
    metrics = Metrics(CollectorRegistry())
    readiness = Readiness(lambda: "rehearsal")
    readiness.ready()
    captioner = Captioner(QueueSettings(times, TIMEOUT_S), readiness, metrics, Timeline(time.monotonic()))
    try:
        defaults = ModelDefaults(checkpoint.tokenizer, checkpoint.config)
        captioner.attach(engine, checkpoint.name, image_decoder, defaults)
        answers = Answers(captioner, _BODY, ImageFetcher((), _BODY), ProblemHandler(metrics, Dispatch()))
        run(_ask(CaptionRoutes(answers), picture(), times))
    finally:
        captioner.close()


class AnswersAtOnce:
    """An engine without a model, with which everything else is rehearsed while the model is loaded."""

    limits = Limits(cache_length=1 << 16, default_new_tokens=2, eos_ids=frozenset(), prompt_read=1 << 16)

    def __init__(self, slots: Slots) -> None:
        """`slots` are the slots of shared pixels into which images are decoded."""
        self._slots = slots

    def submit(self, request: CaptionRequest) -> None:
        if isinstance(request.pixels, int):
            self._slots.give_back(request.pixels)
        request.future.set_result(Completion((0, 1), "length", "none", 0.0, 0.0, 0.0))


class DecodedBefore:
    """An image decoder that decodes nothing, for the rehearsal with the model. The rehearsal without a model has
    left the pixels in the slot that is taken next. Decoding and resizing again could delay READY by a tenth of a
    second."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    async def decode(self, encoded: EncodedImage) -> DecodedImage:
        slot = self._slots.take()
        free = partial(self._slots.give_back, slot)
        return DecodedImage(slot, "jpeg", time.monotonic(), 0.0, (1, 1), free)


async def _ask(routes: CaptionRoutes, image: bytes, times: int) -> None:
    await asyncio.gather(*(_ask_once(routes, image) for _ in range(times)))


async def _ask_once(routes: CaptionRoutes, image: bytes) -> None:
    messages: list[Message] = [{"type": "http.request", "body": image, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.get_running_loop().create_future()  # never ends: the client does not disconnect
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/caption",
        # Two tokens run the first step and a later one. A model's default of several beams is not used, because the
        # beams might wait for a bucket that is not warm yet.
        "query_string": b"max_new_tokens=2&num_beams=1",
        "headers": [(b"content-type", b"image/jpeg"), (b"content-length", b"%d" % len(image))],
    }
    identify(scope)
    request: Any = Request(scope, receive, send)
    response = await routes.caption(request)
    await response(scope, receive, send)
