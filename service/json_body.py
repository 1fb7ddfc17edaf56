"""Bodies of JSON: read under the limits of `body.py`, parsed where it does not hold up the event loop."""

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request

from service.body import BodyLimits, read_body
from service.errors import EmptyBody, InvalidJson, InvalidOption, UnprocessableImage

T = TypeVar("T")
_DATA_URI = re.compile(r"data:[^,]{0,200};base64,")
# Below this, parsing costs the event loop less than handing it to a thread.
_SMALL = 64 << 10


async def read_json(request: Request, limits: BodyLimits, pool: Executor, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of the body, which is not empty. Raises what `read_body` and `parse` raise, EmptyBody."""
    body = await read_body(request, limits)
    if not body:
        raise EmptyBody("The body is empty; send JSON.")
    if len(body) <= _SMALL:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(pool, parse, body)


def json_object(body: bytes, example: str) -> dict[str, Any]:
    """The JSON object that a body is; `example` shows one. Raises InvalidJson."""
    try:
        document = json.loads(body, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise InvalidJson(f"The body is not JSON: {error.msg} at character {error.pos}.") from None
    except (ValueError, RecursionError):  # not UTF-8, NaN, a number of thousands of digits, too deep
        raise InvalidJson("The body is not JSON; send an object in UTF-8 with plain numbers.") from None
    if not isinstance(document, dict):
        raise InvalidJson(f"The body must be a JSON object, such as {example}.")
    return document


def member_object(value: Any, where: str) -> Mapping[str, Any]:
    """A member that may be left out and is an object otherwise. Raises InvalidOption, which names it ``where``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidOption(where, "be an object")
    return value


def image_from_base64(value: Any, member: str) -> bytes:
    """The bytes of an image from base64 or a base64 data URI. Raises UnprocessableImage, which names the member."""
    if isinstance(value, str):
        prefix = _DATA_URI.match(value)
        text = value[prefix.end() :] if prefix else value
        # Whitespace is allowed: `base64` breaks its lines. Few clients do, so it is only looked for then.
        data = _from_base64(text) or _from_base64("".join(text.split()))
        if data:
            return data
    raise UnprocessableImage(f"The member {member} must be base64 text or a base64 data URI.", "not_base64")


def _from_base64(text: str) -> bytes:
    """Empty where it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _no_constant(_name: str) -> NoReturn:
    raise ValueError
