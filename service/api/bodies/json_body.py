"""Reads JSON bodies under the limits of `body.py`, and parses large ones on a thread, not on the event loop."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.requests import Request

from snapcap.service.api.bodies.base64_text import decode_base64
from snapcap.service.api.bodies.body import BodyLimits, parse_body
from snapcap.service.api.bodies.json_text import parse_json
from snapcap.service.errors import EmptyBody, InvalidJson, InvalidOption, UnprocessableImage

T = TypeVar("T")


async def read_json(request: Request, limits: BodyLimits, pool: Executor, parse: Callable[[bytes], T]) -> T:
    """Returns the result of `parse` for a body. Raises EmptyBody and the errors of `parse_body`."""

    def parse_some(body: bytes) -> T:
        if not body:
            raise EmptyBody("The body is empty; send JSON.")
        return parse(body)

    return await parse_body(request, limits, pool, parse_some)


def json_object(body: bytes, example: str) -> dict[str, Any]:
    """Returns the JSON object in a body. `example`: an object for the error message. Raises InvalidJson,
    PayloadTooLarge."""
    document = parse_json(body)
    if not isinstance(document, dict):
        raise InvalidJson(f"The body must be a JSON object, such as {example}.")
    return document


def member_object(value: Any, where: str) -> Mapping[str, Any]:
    """Returns an object member, or {} for None. Raises InvalidOption for other values. ``where``: the member's name
    in the error."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidOption(where, "be an object")
    return value


def image_from_base64(value: Any, member: str) -> bytes:
    """Returns the bytes of an image from base64 or a base64 data URI. Raises UnprocessableImage, which names the
    member."""
    data = decode_base64(value) if isinstance(value, str) else b""
    if not data:
        raise UnprocessableImage(f"The member {member} must be base64 text or a base64 data URI.", "not_base64")
    return data
