"""Reads images and options from the raw body, from multipart/form-data, or from JSON with base64."""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TypeVar

from starlette.requests import Request

from snapcap.models.dataclass import dataclass
from snapcap.service.api.bodies.base64_text import decode_base64
from snapcap.service.api.bodies.body import BodyLimits, parse_received, read_body, read_multipart
from snapcap.service.api.bodies.json_body import image_from_base64, json_object, read_json
from snapcap.service.api.bodies.multipart import Part
from snapcap.service.captioning.options import (
    NAMES,
    CaptionOptions,
    options_from_json,
    options_from_text,
    sort_fields,
)
from snapcap.service.errors import EmptyBody, MissingImage, TooManyImages, UnknownOption, UnsupportedMediaType

T = TypeVar("T")
MULTIPART = "multipart/form-data"
JSON = "application/json"
TEXT = "text/plain"
# Media types that clients send for any body: some send none, and `curl --data` or `fetch` with a text set their
# own.
UNTYPED = ("", "application/octet-stream", "binary/octet-stream", "application/x-www-form-urlencoded", TEXT)
# The begin of a JSON object, after an optional UTF-8 byte order mark. No image format begins like this.
_JSON_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]{0,1000}\{")
_IMAGE_PARTS = ("image", "images")
_MEMBERS = ("image", *NAMES)


@dataclass(frozen=True)
class NamedImage:
    """Holds the bytes of an image file and its file name; "": the client sent no name."""

    data: bytes
    filename: str


def media_type(request: Request) -> str:
    """Returns the Content-Type without parameters, in lower case, or "" if there is none."""
    # `request.headers` would make an object for the whole head, and few requests need another header.
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            kind: bytes = value.partition(b";")[0]
            return kind.decode("latin-1").strip().lower()
    return ""


def is_json(kind: str) -> bool:
    """Tells whether a media type stands for JSON."""
    return kind in (JSON, "text/json") or (kind.startswith("application/") and kind.endswith("+json"))


async def read_image_or_json(
    request: Request, limits: BodyLimits, pool: Executor, parse: Callable[[bytes], T], others: str = ""
) -> T | bytes:
    """Returns the result of `parse` for a JSON body, or the bytes of an image body. With a media type in `UNTYPED`,
    a body that begins like an object is JSON. `others`: further media types that the caller reads, for the error
    message.

    Raises EmptyBody, UnsupportedMediaType and the errors of `read_json`."""
    kind = media_type(request)
    if is_json(kind):
        return await read_json(request, limits, pool, parse)
    if kind not in UNTYPED and not kind.startswith("image/"):
        raise _unsupported(kind, others)
    body = await read_body(request, limits, pool)
    if not body:
        raise EmptyBody("The body is empty; send the bytes of an image, as `curl --data-binary @photo.jpg` does.")
    if kind in UNTYPED and _JSON_OBJECT.match(body):
        return await parse_received(request, body, pool, parse)
    if kind == TEXT:
        raise _unsupported(kind, others)
    return body


async def read_image(request: Request, limits: BodyLimits, pool: Executor) -> tuple[bytes, CaptionOptions]:
    """Returns the image and the options of a /v1/caption request. Options in the body override options in the
    query.

    Raises the subclasses of BadRequest that say what is wrong."""
    query = _query_options(request)
    if media_type(request) == MULTIPART:
        images, options = await read_images(request, limits, pool, 1)
        return images[0].data, options
    found = await read_image_or_json(request, limits, pool, lambda body: _from_json(body, query), f", {MULTIPART}")
    return (found, query) if isinstance(found, bytes) else found


async def read_images(
    request: Request, limits: BodyLimits, pool: Executor, at_most: int
) -> tuple[list[NamedImage], CaptionOptions]:
    """Returns the images and the options of a multipart body: its parts named image or images, at least one.

    Raises the subclasses of BadRequest that say what is wrong."""
    query = _query_options(request)
    if media_type(request) != MULTIPART:
        raise UnsupportedMediaType(f"Send the images as {MULTIPART}, as `curl -F image=@photo.jpg` does.")
    return await read_multipart(request, limits, pool, lambda parts: _from_form(parts, query, at_most))


def _unsupported(kind: str, others: str) -> UnsupportedMediaType:
    return UnsupportedMediaType(f"The content type {kind[:100]} is not read; send an image{others} or {JSON}.")


def _query_options(request: Request) -> CaptionOptions:
    if not request.scope["query_string"]:
        return CaptionOptions()
    return _options_from_text(request.query_params.multi_items(), CaptionOptions())


def _options_from_text(pairs: Iterable[tuple[str, str]], base: CaptionOptions) -> CaptionOptions:
    fields = sort_fields(pairs, NAMES)
    return options_from_text(fields.known, base).ignoring(*fields.ignored)


def _from_form(
    parts: Iterable[Part], query: CaptionOptions, at_most: int
) -> tuple[list[NamedImage], CaptionOptions]:
    given = [part for part in parts if not part.is_empty_input]
    files = [part.name for part in given if part.filename is not None]
    pictures = [part for part in given if part.filename is not None or (part.name in _IMAGE_PARTS and part.data)]
    if files and not any(part.name in _IMAGE_PARTS for part in pictures):
        raise MissingImage(
            f"There is a file part named {files[0][:64]!r}, and none named image; send it as "
            "`curl -F image=@photo.jpg` does."
        )
    if unknown := [name for name in files if name not in _IMAGE_PARTS]:
        raise UnknownOption(unknown[0], (*_IMAGE_PARTS, *NAMES))
    if len(pictures) > at_most:
        raise TooManyImages(_too_many(len(pictures), at_most))
    images = [_named_image(part) for part in pictures]
    fields = [part for part in given if part.filename is None and part.name not in _IMAGE_PARTS]
    options = _options_from_text([(part.name, part.text) for part in fields], query)
    if not images:
        raise MissingImage("There is no file part named image; send one as `curl -F image=@photo.jpg` does.")
    return images, options


def _named_image(part: Part) -> NamedImage:
    if part.filename is not None:
        return NamedImage(part.data, part.filename)
    # Some clients send no file name for bytes from memory, and web pages send a canvas as a data URI.
    image = decode_base64(part.data) if part.data.isascii() else part.data
    if not image:
        raise MissingImage("The part named image has no file name; send a file part (`-F image=@photo.jpg`).")
    return NamedImage(image, "")


def _too_many(count: int, at_most: int) -> str:
    if at_most == 1:
        return f"There are {count} images; send one, or several to POST /v1/captions."
    return f"There are {count} images; send at most {at_most} in one request."


def _from_json(body: bytes, query: CaptionOptions) -> tuple[bytes, CaptionOptions]:
    fields = sort_fields(json_object(body, '{"image": "…base64…"}').items(), _MEMBERS, _MEMBERS)
    document = dict(fields.known)
    image = document.pop("image", None)
    if image is None or image == "":
        raise MissingImage("The member image is missing; send the image there as base64 or as a data URI.")
    return image_from_base64(image, "image"), options_from_json(document, query).ignoring(*fields.ignored)
