"""The forms in which images arrive: the raw body, multipart/form-data, or JSON with base64."""

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.datastructures import UploadFile
from starlette.requests import Request

from service.body import BodyLimits, read_body, read_multipart
from service.caption_options import NAMES, CaptionOptions, options_from_json, options_from_text
from service.errors import (
    EmptyBody,
    InvalidJson,
    MissingImage,
    TooManyImages,
    UnknownOption,
    UnprocessableImage,
    UnsupportedMediaType,
)

MULTIPART = "multipart/form-data"
JSON = "application/json"
# curl --data-binary sends the form type whatever the body is; some clients send no type at all.
_RAW = ("", "application/octet-stream", "binary/octet-stream", "application/x-www-form-urlencoded")
_IMAGE_PARTS = ("image", "images")
_DATA_URI = re.compile(r"data:[^,]{0,200};base64,")
# Below this, parsing costs the event loop less than handing it to a thread.
_SMALL_JSON = 64 << 10


@dataclass(frozen=True)
class NamedImage:
    """The bytes of an image file and the file name it came with."""

    data: bytes
    filename: str


def media_type(request: Request) -> str:
    """The Content-Type without parameters, in lower case; empty when there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_image(request: Request, limits: BodyLimits, pool: Executor) -> tuple[bytes, CaptionOptions]:
    """The one image of /v1/caption and the options, those in the body over those in the query.

    Raises the subclasses of BadRequest that say what is wrong."""
    query = options_from_text(request.query_params.multi_items())
    kind = media_type(request)
    if kind == MULTIPART:
        images, options = await read_images(request, limits, 1)
        return images[0].data, options
    if kind == JSON:
        body = await read_body(request, limits)
        if not body:
            raise EmptyBody("The body is empty; send JSON with the member image.")
        if len(body) <= _SMALL_JSON:
            return _from_json(body, query)
        return await asyncio.get_running_loop().run_in_executor(pool, _from_json, body, query)
    if kind in _RAW or kind.startswith("image/"):
        image = await read_body(request, limits)
        if not image:
            raise EmptyBody(
                "The body is empty; send the bytes of an image, as `curl --data-binary @photo.jpg` does."
            )
        return image, query
    raise UnsupportedMediaType(f"The content type {kind[:100]} is not read; send an image, {MULTIPART} or {JSON}.")


async def read_images(
    request: Request, limits: BodyLimits, at_most: int
) -> tuple[list[NamedImage], CaptionOptions]:
    """The file parts named image or images of a multipart body, at least one, and the options.

    Raises the subclasses of BadRequest that say what is wrong."""
    query = options_from_text(request.query_params.multi_items())
    if media_type(request) != MULTIPART:
        raise UnsupportedMediaType(f"Send the images as {MULTIPART}, as `curl -F image=@photo.jpg` does.")
    parts = await read_multipart(request, limits)
    images = [_named_image(name, part) for name, part in parts if isinstance(part, UploadFile)]
    options = options_from_text(_fields(parts), query)
    if not images:
        raise MissingImage("There is no file part named image; send one as `curl -F image=@photo.jpg` does.")
    if len(images) > at_most:
        raise TooManyImages(_too_many(len(images), at_most))
    return images, options


def _named_image(name: str, part: UploadFile) -> NamedImage:
    if name not in _IMAGE_PARTS:
        raise UnknownOption(name, (*_IMAGE_PARTS, *NAMES))
    return NamedImage(part.file.read(), part.filename or "")


def _fields(parts: Iterable[tuple[str, str | UploadFile]]) -> list[tuple[str, str]]:
    fields = [(name, part) for name, part in parts if isinstance(part, str)]
    if any(name in _IMAGE_PARTS for name, _ in fields):
        raise MissingImage("The part named image has no file name; send a file part (`-F image=@photo.jpg`).")
    return fields


def _too_many(count: int, at_most: int) -> str:
    if at_most == 1:
        return f"There are {count} images; send one, or several to POST /v1/captions."
    return f"There are {count} images; send at most {at_most} in one request."


def _from_json(body: bytes, query: CaptionOptions) -> tuple[bytes, CaptionOptions]:
    try:
        document = json.loads(body, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise InvalidJson(f"The body is not JSON: {error.msg} at character {error.pos}.") from None
    except (ValueError, RecursionError):  # not UTF-8, NaN, a number of thousands of digits, too deep
        raise InvalidJson("The body is not JSON; send an object in UTF-8 with plain numbers.") from None
    if not isinstance(document, dict):
        raise InvalidJson('The body must be a JSON object, such as {"image": "…base64…"}.')
    image = document.pop("image", None)
    if image is None or image == "":
        raise MissingImage("The member image is missing; send the image there as base64 or as a data URI.")
    return _from_base64(image), options_from_json(document, query)


def _no_constant(_name: str) -> NoReturn:
    raise ValueError


def _from_base64(image: Any) -> bytes:
    if isinstance(image, str):
        prefix = _DATA_URI.match(image)
        text = image[prefix.end() :] if prefix else image
        try:
            # Whitespace is allowed: `base64` breaks its lines.
            data = base64.b64decode("".join(text.split()), validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if data:
            return data
    raise UnprocessableImage("The member image must be base64 text or a base64 data URI.", "not_base64")
