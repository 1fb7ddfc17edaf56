"""Answers POST /v1/caption and POST /v1/captions."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.api.bodies.disconnect import unless_disconnected
from snapcap.service.api.bodies.replies import JsonReply, RawHeaders, ignored_header
from snapcap.service.api.caption.request import NamedImage, read_image, read_images
from snapcap.service.api.middleware.request_id import request_id
from snapcap.service.api.middleware.request_log import new_caption
from snapcap.service.api.problems import as_service_error, forget_frames, problem
from snapcap.service.api.routing import Api, RouteGroup
from snapcap.service.captioning.captioner import Captioner, CaptionResult
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.errors import EngineFailed, ServiceError
from snapcap.service.memory import body_account
from snapcap.service.telemetry.metrics import Metrics

MAX_IMAGES = 16
Read = Callable[[Request, BodyLimits, Executor], Awaitable[tuple[bytes, CaptionOptions]]]
_logger = logging.getLogger("snapcap.access")


async def caption_of(
    request: Request, captioner: Captioner, limits: BodyLimits, read: Read
) -> tuple[CaptionResult, RawHeaders]:
    """Captions the image that `read` returns for the request. Returns the result and the headers of the reply."""
    with captioner.admit() as permit:
        image, options = await read(request, limits, captioner.pool)
        permit.take()
        scope = request.scope
        times, account = new_caption(scope), body_account(scope)
        work = captioner.caption(image, options, request_id(scope), permit, account, times)
        return await unless_disconnected(request.receive, work), ignored_header(options.ignored)


class CaptionRoutes:
    """Serves the two endpoints of the API for one captioner."""

    def __init__(self, captioner: Captioner, limits: BodyLimits, metrics: Metrics) -> None:
        self._captioner = captioner
        self._limits = limits
        self._metrics = metrics

    def group(self) -> RouteGroup:
        routes = [
            Route("/v1/caption", self.caption, methods=["POST"]),
            Route("/v1/captions", self.captions, methods=["POST"]),
        ]
        return RouteGroup("captions", routes, Api("caption", captions=True))

    async def caption(self, request: Request) -> Response:
        """The image is the body, a part of a form, or base64 in JSON. Options in the body win over those in the
        query."""
        result, headers = await caption_of(request, self._captioner, self._limits, read_image)
        return JsonReply(result.to_dict(), headers)

    async def captions(self, request: Request) -> Response:
        """The file parts are named image or images; the options hold for all. The reply has, in order, a caption
        or a problem for each image.

        The request fails as a whole only when it is itself bad, or when every image was refused for a reason
        that passes (429, 503, 504), so that clients and load balancers retry it."""
        self._captioner.admit()  # refuses early; each image gets a permit of its own after the body is read
        images, options = await read_images(request, self._limits, self._captioner.pool, MAX_IMAGES)
        outcomes = await unless_disconnected(request.receive, self._caption_all(request, images, options))
        errors = [outcome for outcome in outcomes if isinstance(outcome, ServiceError)]
        if len(errors) == len(outcomes) and all(error.status in (429, 503, 504) for error in errors):
            raise errors[0]
        items = [
            {"index": index, "filename": image.filename, **self._item(request, outcome)}
            for index, (image, outcome) in enumerate(zip(images, outcomes, strict=True))
        ]
        return JsonReply({"captions": items}, ignored_header(options.ignored))

    async def _caption_all(
        self, request: Request, images: list[NamedImage], options: CaptionOptions
    ) -> list[CaptionResult | ServiceError]:
        return await asyncio.gather(
            *(self._caption_one(request, index, image, options) for index, image in enumerate(images))
        )

    async def _caption_one(
        self, request: Request, index: int, image: NamedImage, options: CaptionOptions
    ) -> CaptionResult | ServiceError:
        identity, account = f"{request_id(request.scope)}/{index}", body_account(request.scope)
        try:
            with self._captioner.admit() as permit:
                permit.take()
                times = new_caption(request.scope)
                return await self._captioner.caption(image.data, options, identity, permit, account, times)
        except Exception as error:
            failure = as_service_error(error)
            if isinstance(failure, EngineFailed):
                _logger.error("image failed", exc_info=error, extra={"fields": {"request_id": identity}})
            forget_frames(error)
            return failure

    def _item(self, request: Request, outcome: CaptionResult | ServiceError) -> dict[str, Any]:
        if isinstance(outcome, CaptionResult):
            return outcome.to_dict()
        self._metrics.count_rejection(outcome)
        return problem(outcome, request.url.path, request_id(request.scope))
