"""Captions before READY, as a client's: what a request would be the first to do is done by these."""

import asyncio
import io
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fastapi import Request
from PIL import Image
from prometheus_client import CollectorRegistry
from starlette.types import Message, Scope

from service.body import BodyLimits
from service.captioner import Captioner, CaptionLimits
from service.limits import Limits
from service.metrics import Metrics
from service.readiness import Readiness
from service.request import CaptionRequest, Completion
from service.request_id import identify
from service.routes.caption import CaptionRoutes
from warmup.timeline import Timeline

if TYPE_CHECKING:
    from service.request import CaptionEngine
    from warmup.prepared import Checkpoint

TIMEOUT_S = 30.0
SIZE = (500, 375)
_BODY = BodyLimits(1 << 20, TIMEOUT_S)


class Rehearsal:
    """A client of the endpoint of captions, on an event loop of its own and with metrics that nobody reads."""

    def __init__(self, checkpoint: "Checkpoint", pool: ThreadPoolExecutor) -> None:
        """``pool``: the threads that will decode for clients, which have their memory and their caches once they
        have done so here."""
        self._checkpoint = checkpoint
        self._pool = pool
        self._metrics = Metrics(CollectorRegistry())
        self._readiness = Readiness(lambda: "rehearsal")
        self._readiness.ready()
        self._runner = asyncio.Runner()

    def __enter__(self) -> "Rehearsal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()

    @cached_property
    def _picture(self) -> bytes:
        return picture()

    def without_engine(self, threads: int) -> None:
        """What this process does for a caption, on each of so many threads: while the model is loaded elsewhere
        there is time for it. Raises what the endpoint raises."""
        self._ask(_AnswersAtOnce(), threads)

    def ask(self, engine: "CaptionEngine") -> None:
        """One caption. Raises what the endpoint raises."""
        self._ask(engine, 1)

    def _ask(self, engine: "CaptionEngine", times: int) -> None:
        limits = CaptionLimits(TIMEOUT_S, times)
        captioner = Captioner(limits, self._readiness, self._metrics, Timeline(time.monotonic()), self._pool)
        checkpoint = self._checkpoint
        captioner.attach(engine, checkpoint.transform, checkpoint.tokenizer, checkpoint.name)
        self._runner.run(_ask(CaptionRoutes(captioner, _BODY, self._metrics), self._picture, times))


def rehearse(engine: "CaptionEngine", checkpoint: "Checkpoint", pool: ThreadPoolExecutor) -> None:
    """One caption of an engine of this process. Raises what the endpoint raises."""
    with Rehearsal(checkpoint, pool) as rehearsal:
        rehearsal.ask(engine)


class _AnswersAtOnce:
    """An engine without a model."""

    limits = Limits(cache_length=8, default_new_tokens=2, eos_ids=frozenset())

    def submit(self, request: CaptionRequest) -> None:
        request.future.set_result(Completion((0, 1), "length", "none", 0.0, 0.0, 0.0))


def picture() -> bytes:
    """A JPEG of ``SIZE``, as clients send them."""
    stream = io.BytesIO()
    Image.linear_gradient("L").resize(SIZE).convert("RGB").save(stream, "JPEG")
    return stream.getvalue()


async def _ask(routes: CaptionRoutes, image: bytes, times: int) -> None:
    """So many requests at once."""
    await asyncio.gather(*(_ask_once(routes, image) for _ in range(times)))


async def _ask_once(routes: CaptionRoutes, image: bytes) -> None:
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
