"""Serves snapcap's own API: POST /v1/caption and POST /v1/captions.

Images and options are read from the raw body, from multipart/form-data, or from JSON with base64 or a URL.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from snapcap.service.api.answers import Answers, ChatRequest
from snapcap.service.captioning.captioner import CaptionResult
from snapcap.service.captioning.options import (
    NAMES,
    CaptionOptions,
    options_from_json,
    options_from_text,
    sort_fields,
)
from snapcap.service.captioning.stream import CaptionStream
from snapcap.service.errors import (
    EngineFailed,
    InvalidOption,
    MissingImage,
    ServiceError,
    TooManyImages,
    UnknownOption,
    UnsupportedMediaType,
)
from snapcap.service.http.bodies import (
    MULTIPART,
    BodyLimits,
    image_or_url,
    json_object,
    media_type,
    read_image_or_json,
    read_multipart,
)
from snapcap.service.http.json_text import decode_base64
from snapcap.service.http.middleware import new_caption, request_id
from snapcap.service.http.multipart import Part
from snapcap.service.http.problems import as_service_error, forget_frames, problem
from snapcap.service.http.replies import (
    EventStream,
    JsonReply,
    accepted_types,
    ignored_header,
    unless_disconnected,
)
from snapcap.service.http.routing import Api, RouteGroup

MAX_IMAGES = 16  # in one request
_logger = logging.getLogger("snapcap.access")
_IMAGE_PARTS = ("image", "images")
_IMAGE_PART = re.compile(r"images?(?:\[[0-9]{0,9}\])?")  # PHP and some libraries of browsers send images[]
MODEL = "model"
# The fields of a query or form.
FIELDS = (MODEL, *NAMES)
_OPTIONS = ("image", *NAMES)
LONGEST_NAME = 200


class CaptionRoutes:
    """Serves the two endpoints of the API for one captioner."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._captioner = answers.captioner

    def group(self) -> RouteGroup:
        routes = [
            Route("/v1/caption", self.caption, methods=["POST"]),
            Route("/v1/captions", self.captions, methods=["POST"]),
        ]
        return RouteGroup("captions", routes, Api("caption", captions=True))

    async def caption(self, request: Request) -> Response:
        """The image is the body, a part of a form, or base64 or a URL in JSON. An option in the body overrides the
        same option in the query.

        A request whose Accept header names `text/event-stream`, and no JSON, gets the caption while it is written:
        events with a piece of the caption each, then the whole reply as the last event."""
        accepted = accepted_types(request)
        if EventStream.media_type not in accepted or "json" in accepted:
            result, headers = await self._answers.caption(request, read_image)
            return JsonReply(result.to_dict(), headers)
        with self._captioner.admit() as permit:
            image, options = await read_image(request, self._answers.limits)
            wanted = ChatRequest(image, options, stop=(), stream=True)
            return await self._answers.streamed(request, wanted, permit, partial(self._events, request))

    async def _events(
        self, request: Request, stream: CaptionStream, pieces: AsyncIterator[str]
    ) -> AsyncGenerator[str, None]:
        try:
            async for piece in pieces:
                yield json.dumps({"text": piece})
            whole = self._captioner.result(stream).to_dict()
        except Exception as error:
            failure = self._answers.handler.note(request, error)
            whole = problem(failure, request.scope["path"], request_id(request.scope))
        yield json.dumps(whole)

    async def captions(self, request: Request) -> Response:
        """The file parts are named image or images. The options apply to all images. The reply has, in order, a
        caption or a problem for each image.

        The whole request fails only if the request itself is invalid, or if every image was refused for a
        temporary reason (429, 503, 504). Clients and load balancers then retry it."""
        self._captioner.admit()  # refuses early; each image gets a permit of its own after the body is read
        images, options = await read_images(request, self._answers.limits, MAX_IMAGES)
        self._captioner.named(options.model)  # a model that does not exist is one error, not one for each image
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
        self, request: Request, images: list[Part], options: CaptionOptions
    ) -> list[CaptionResult | ServiceError]:
        return await asyncio.gather(
            *(self._caption_one(request, index, image, options) for index, image in enumerate(images))
        )

    async def _caption_one(
        self, request: Request, index: int, image: Part, options: CaptionOptions
    ) -> CaptionResult | ServiceError:
        try:
            with self._captioner.admit() as permit:
                captioner = self._captioner.named(options.model, permit)
                permit.take()
                return await captioner.caption(image.data, options, new_caption(request.scope, permit, index))
        except Exception as error:
            failure = as_service_error(error)
            if isinstance(failure, EngineFailed):
                fields = {"request_id": f"{request_id(request.scope)}/{index}"}
                _logger.error("image failed", exc_info=error, extra={"fields": fields})
            forget_frames(error)
            return failure

    def _item(self, request: Request, outcome: CaptionResult | ServiceError) -> dict[str, Any]:
        if isinstance(outcome, CaptionResult):
            return outcome.to_dict()
        self._answers.handler.metrics.count_rejection(outcome)
        return problem(outcome, request.scope["path"], request_id(request.scope))


async def read_image(request: Request, limits: BodyLimits) -> tuple[bytes | str, CaptionOptions]:
    """Returns the image, or its URL, and the options of a /v1/caption request. Options in the body override options
    in the query. Raises BadRequest."""
    query = _query_options(request)
    if media_type(request) == MULTIPART:
        images, options = await read_images(request, limits, 1)
        return images[0].data, options
    found = await read_image_or_json(request, limits, lambda body: _from_json(body, query), f", {MULTIPART}")
    return (found, query) if isinstance(found, bytes) else found


async def read_images(request: Request, limits: BodyLimits, at_most: int) -> tuple[list[Part], CaptionOptions]:
    """Returns the images and the options of a multipart body: its parts named image or images, at least one. Raises
    BadRequest."""
    query = _query_options(request)
    if media_type(request) != MULTIPART:
        raise UnsupportedMediaType(f"Send the images as {MULTIPART}, as `curl -F image=@photo.jpg` does.")
    return await read_multipart(request, limits, lambda parts: _from_form(parts, query, at_most))


def _query_options(request: Request) -> CaptionOptions:
    if not request.scope["query_string"]:
        return CaptionOptions()
    return _options_from_text(request.query_params.multi_items(), CaptionOptions())


def _options_from_text(pairs: Iterable[tuple[str, str]], base: CaptionOptions) -> CaptionOptions:
    fields = sort_fields(pairs, FIELDS)
    models = [text for name, text in fields.known if name == MODEL and text]
    if len(models) > 1:
        raise InvalidOption(MODEL, "be given once")
    options = options_from_text([pair for pair in fields.known if pair[0] != MODEL], base)
    return with_model(options, models[0] if models else None).ignoring(*fields.ignored)


def with_model(options: CaptionOptions, name: Any) -> CaptionOptions:
    """Returns the options with the model that a request names; None or "" names none. Raises InvalidOption."""
    if name in (None, ""):
        return options
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        raise InvalidOption(MODEL, f"be a name of at most {LONGEST_NAME} characters")
    return replace(options, model=name)


def _from_form(parts: Iterable[Part], query: CaptionOptions, at_most: int) -> tuple[list[Part], CaptionOptions]:
    given = [part for part in parts if not part.is_empty_input]
    files = [part.name for part in given if part.filename is not None]
    pictures = [part for part in given if part.filename is not None or (_is_image(part.name) and part.data)]
    if files and not any(_is_image(part.name) for part in pictures):
        raise MissingImage(
            f"The form has a file part named {files[0][:64]!r}, but none named image; send the image as "
            "`curl -F image=@photo.jpg` does."
        )
    if unknown := [name for name in files if not _is_image(name)]:
        raise UnknownOption(unknown[0], (*_IMAGE_PARTS, *NAMES))
    if len(pictures) > at_most:
        one, several = "send one, or send several to POST /v1/captions", f"send at most {at_most} in one request"
        raise TooManyImages(f"The request has {len(pictures)} images; {one if at_most == 1 else several}.")
    images = [_picture(part) for part in pictures]
    fields = [part for part in given if part.filename is None and not _is_image(part.name)]
    options = _options_from_text([(part.name, part.text) for part in fields], query)
    if not images:
        raise MissingImage("The form has no file part named image; send one as `curl -F image=@photo.jpg` does.")
    return images, options


def _is_image(name: str) -> bool:
    return _IMAGE_PART.fullmatch(name) is not None


def _picture(part: Part) -> Part:
    """Returns the part of an image as a file, whose name is "" if the client sent none."""
    if part.filename is not None:
        return part
    # Some clients send no file name for bytes from memory, and web pages send a canvas as a data URI.
    image = decode_base64(part.data) if part.data.isascii() else part.data
    if not image:
        how = "send a file part (`-F image=@photo.jpg`), or a URL in JSON to POST /v1/caption"
        raise MissingImage(f"The part named image has no file name; {how}.")
    return replace(part, data=image, filename="")


def _from_json(body: bytes, query: CaptionOptions) -> tuple[bytes | str, CaptionOptions]:
    fields = sort_fields(json_object(body, '{"image": "…base64…"}').items(), (MODEL, *_OPTIONS), _OPTIONS)
    document = dict(fields.known)
    image = document.pop("image", None)
    if image is None or image == "":
        raise MissingImage("The member image is missing; send the image there as base64, a data URI or a URL.")
    options = with_model(query, document.pop(MODEL, None))
    return image_or_url(image, "image"), options_from_json(document, options).ignoring(*fields.ignored)
