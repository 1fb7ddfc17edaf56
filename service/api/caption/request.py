"""Reads images and options from the raw body, from multipart/form-data, or from JSON with base64."""

from collections.abc import Iterable
from concurrent.futures import Executor

from starlette.requests import Request

from snapcap.models.dataclass import dataclass
from snapcap.service.api.bodies.body import BodyLimits, read_body, read_multipart
from snapcap.service.api.bodies.json_body import image_from_base64, json_object, read_json
from snapcap.service.api.bodies.multipart import Part
from snapcap.service.captioning.options import NAMES, CaptionOptions, options_from_json, options_from_text
from snapcap.service.errors import EmptyBody, MissingImage, TooManyImages, UnknownOption, UnsupportedMediaType

MULTIPART = "multipart/form-data"
JSON = "application/json"
# curl --data-binary sends the form type whatever the body is; some clients send no type at all.
_RAW = ("", "application/octet-stream", "binary/octet-stream", "application/x-www-form-urlencoded")
_IMAGE_PARTS = ("image", "images")


@dataclass(frozen=True)
class NamedImage:
    """The bytes of an image file and the file name it came with."""

    data: bytes
    filename: str


def media_type(request: Request) -> str:
    """The Content-Type without parameters, in lower case; empty when there is none."""
    # Not request.headers, which is an object for the whole head: few requests ask for more than this.
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            kind: bytes = value.partition(b";")[0]
            return kind.decode("latin-1").strip().lower()
    return ""


def is_raw(kind: str) -> bool:
    """Whether a body of this media type is the image itself."""
    return kind in _RAW or kind.startswith("image/")


async def read_raw(request: Request, limits: BodyLimits) -> bytes:
    """The body as an image. Raises EmptyBody and what `read_body` raises."""
    image = await read_body(request, limits)
    if not image:
        raise EmptyBody("The body is empty; send the bytes of an image, as `curl --data-binary @photo.jpg` does.")
    return image


async def read_image(request: Request, limits: BodyLimits, pool: Executor) -> tuple[bytes, CaptionOptions]:
    """The one image of /v1/caption and the options, those in the body over those in the query.

    Raises the subclasses of BadRequest that say what is wrong."""
    query = _query_options(request)
    kind = media_type(request)
    if kind == MULTIPART:
        images, options = await read_images(request, limits, pool, 1)
        return images[0].data, options
    if kind == JSON:
        return await read_json(request, limits, pool, lambda body: _from_json(body, query))
    if is_raw(kind):
        return await read_raw(request, limits), query
    raise UnsupportedMediaType(f"The content type {kind[:100]} is not read; send an image, {MULTIPART} or {JSON}.")


async def read_images(
    request: Request, limits: BodyLimits, pool: Executor, at_most: int
) -> tuple[list[NamedImage], CaptionOptions]:
    """The file parts named image or images of a multipart body, at least one, and the options.

    Raises the subclasses of BadRequest that say what is wrong."""
    query = _query_options(request)
    if media_type(request) != MULTIPART:
        raise UnsupportedMediaType(f"Send the images as {MULTIPART}, as `curl -F image=@photo.jpg` does.")
    parts = await read_multipart(request, limits, pool)
    files = [part.name for part in parts if part.filename is not None]
    if files and not any(name in _IMAGE_PARTS for name in files):
        raise MissingImage(
            f"There is a file part named {files[0][:64]!r}, and none named image; send it as "
            "`curl -F image=@photo.jpg` does."
        )
    images = [_named_image(part, part.filename) for part in parts if part.filename is not None]
    options = options_from_text(_fields(parts), query)
    if not images:
        raise MissingImage("There is no file part named image; send one as `curl -F image=@photo.jpg` does.")
    if len(images) > at_most:
        raise TooManyImages(_too_many(len(images), at_most))
    return images, options


def _query_options(request: Request) -> CaptionOptions:
    if not request.scope["query_string"]:
        return CaptionOptions()
    return options_from_text(request.query_params.multi_items())


def _named_image(part: Part, filename: str) -> NamedImage:
    if part.name not in _IMAGE_PARTS:
        raise UnknownOption(part.name, (*_IMAGE_PARTS, *NAMES))
    return NamedImage(part.data, filename)


def _fields(parts: Iterable[Part]) -> list[tuple[str, str]]:
    fields = [part for part in parts if part.filename is None]
    if any(part.name in _IMAGE_PARTS for part in fields):
        raise MissingImage("The part named image has no file name; send a file part (`-F image=@photo.jpg`).")
    return [(part.name, part.text) for part in fields]


def _too_many(count: int, at_most: int) -> str:
    if at_most == 1:
        return f"There are {count} images; send one, or several to POST /v1/captions."
    return f"There are {count} images; send at most {at_most} in one request."


def _from_json(body: bytes, query: CaptionOptions) -> tuple[bytes, CaptionOptions]:
    document = json_object(body, '{"image": "…base64…"}')
    image = document.pop("image", None)
    if image is None or image == "":
        raise MissingImage("The member image is missing; send the image there as base64 or as a data URI.")
    return image_from_base64(image, "image"), options_from_json(document, query)
