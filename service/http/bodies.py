"""Reads a request body under limits of its size, its time, and the memory of all bodies together.

A body is JSON, a form, or the bytes of an image, and may be compressed. A large one is parsed and decompressed on a
thread, so that the event loop stays free.
"""

import asyncio
import io
import math
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from starlette.requests import Request

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import (
    BodyTimeout,
    ClientDisconnected,
    EmptyBody,
    InvalidEncoding,
    InvalidJson,
    InvalidOption,
    PayloadTooLarge,
    UnprocessableImage,
    UnsupportedEncoding,
    UnsupportedMediaType,
)
from snapcap.service.http.json_text import decode_base64, is_url, parse_json
from snapcap.service.http.multipart import Part, boundary_of, parse_multipart
from snapcap.service.limits import DECOMPRESSION_CPU_S
from snapcap.service.memory import BodyAccount, BodyBudget, body_account, open_account

T = TypeVar("T")
MULTIPART = "multipart/form-data"
JSON = "application/json"
_TEXT = "text/plain"
# Media types that clients send for any body: some send none, and `curl --data` or `fetch` with a text set their
# own.
UNTYPED = (
    *("", "*/*", "application/octet-stream", "application/x-octet-stream", "binary/octet-stream"),
    *("application/binary", "application/unknown", "application/x-www-form-urlencoded", _TEXT),
)
# The begin of a JSON object, after an optional UTF-8 byte order mark. No image format begins like this.
_JSON_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]{0,1000}\{")
# A body that keeps coming at this rate is slow, not stalled. 256 kbit/s.
MIN_BYTES_PER_S = 32 << 10
# Parsing a body of up to this size holds the event loop up for a few milliseconds at most, whatever is in it: forms
# with many heads take about one for each KiB.
SMALL = 4 << 10
_GZIP, _DEFLATE = "gzip", "deflate"
_NAMES = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}
# Encodings of characters and of mails, which some clients name here, change nothing.
_NO_CODINGS = ("", "identity", "none", "utf-8", "utf8", "binary", "8bit")
_MOST_CODINGS = 2  # codings of one body, applied one after the other
_MOST_MEMBERS = 1000  # members of a gzip file; starting each takes time
_PIECE = 64 << 10
# zlib's `wbits` values, which name the header around the compressed bytes.
_GZIP_HEAD, _ZLIB_HEAD, _NO_HEAD = 31, 15, -15


@dataclass(frozen=True)
class BodyLimits:
    """Holds the limits of bodies. `max_bytes`: maximum size of one body. `timeout`: seconds by which a body may lag
    behind 32 KiB a second. `total_timeout`: maximum seconds for one body. `budget`: memory of all bodies
    together. `pool`: threads for work on bodies that would block the event loop."""

    max_bytes: int
    timeout: float
    total_timeout: float = math.inf
    budget: BodyBudget = field(default_factory=BodyBudget)
    pool: Executor = field(default_factory=partial(ThreadPoolExecutor, 2))


class BodyClock:
    """Computes the deadline for the next bytes of a body, in seconds of the event loop's clock.

    The deadline is never later than `timeout` from now. Otherwise a body that came fast and then stalled could hold
    the connection for the time that its bytes have earned."""

    def __init__(self, limits: BodyLimits) -> None:
        now = asyncio.get_running_loop().time()
        self._timeout = limits.timeout
        self._last = now + limits.total_timeout
        self.end = min(now + limits.timeout, self._last)

    def received(self, count: int) -> None:
        """Moves the deadline, as `count` bytes have arrived now."""
        latest = asyncio.get_running_loop().time() + self._timeout
        self.end = min(self.end + count / MIN_BYTES_PER_S, latest, self._last)


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
    return kind in (JSON, "text/json", "application/x-json", "text/x-json") or (
        kind.startswith("application/") and kind.endswith("+json")
    )


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Returns the whole body, decompressed. The body counts against the request's memory account.

    Raises PayloadTooLarge, BodyTimeout, BodyMemoryFull, ClientDisconnected, UnsupportedEncoding and
    InvalidEncoding."""
    codings = codings_of(request.scope["headers"]) if _check_head(request, limits) else ()
    account, clock = open_account(request.scope, limits.budget), BodyClock(limits)
    # The buffer grows as a whole: after many small allocations, the allocator would return little memory to the
    # system.
    body = io.BytesIO()
    received, more = 0, True
    while more:
        try:
            async with asyncio.timeout_at(clock.end):
                message = await request.receive()
        except TimeoutError:
            raise BodyTimeout(f"The body stalled after {received} bytes; send it faster.") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        received += len(chunk)
        if received > limits.max_bytes:
            raise _too_large(limits)
        account.take(len(chunk))
        clock.received(len(chunk))
        body.write(chunk)
    whole = body.getvalue()  # BytesIO shares its buffer here: no copy
    if not codings or not whole:
        return whole
    work = partial(decompress, whole, codings, limits.max_bytes, account.take)
    return await _on_thread(account, limits.pool, work, lambda: account.give_back(len(whole)))


async def read_image_or_json(
    request: Request, limits: BodyLimits, parse: Callable[[bytes], T], others: str = ""
) -> T | bytes:
    """Returns the result of `parse` for a JSON body, or the bytes of an image body. With a media type in `UNTYPED`,
    a body that begins like an object is JSON. `others`: further media types that the caller reads, for the error
    message.

    Raises EmptyBody, UnsupportedMediaType and the errors of `read_json`."""
    kind = media_type(request)
    if is_json(kind):
        return await read_json(request, limits, parse)
    if kind not in UNTYPED and not kind.startswith("image/"):
        raise _unsupported(kind, others)
    body = await read_body(request, limits)
    if not body:
        raise EmptyBody("The body is empty; send the bytes of an image, as `curl --data-binary @photo.jpg` does.")
    if kind in UNTYPED and _JSON_OBJECT.match(body):
        return await parse_received(request, limits, body, parse)
    if kind == _TEXT:
        raise _unsupported(kind, others)
    return body


async def read_json(request: Request, limits: BodyLimits, parse: Callable[[bytes], T]) -> T:
    """Returns the result of `parse` for a body. Raises EmptyBody and the errors of `read_body` and of `parse`."""
    body = await read_body(request, limits)
    if not body:
        raise EmptyBody("The body is empty; send JSON.")
    return await parse_received(request, limits, body, parse)


async def read_multipart(request: Request, limits: BodyLimits, parse: Callable[[list[Part]], T]) -> T:
    """Returns the result of `parse` for the parts of a multipart body, in order. Raises the errors of `read_body`
    and of `parse`, InvalidMultipart, and UnsupportedMediaType."""
    boundary, charset = boundary_of(request.headers.get("content-type", ""))
    body = await read_body(request, limits)
    # Each part is a copy, and decoding an image in base64 makes another.
    return await parse_received(
        request, limits, body, lambda data: parse(parse_multipart(boundary, data, charset)), copies=2
    )


async def parse_received(
    request: Request, limits: BodyLimits, body: bytes, parse: Callable[[bytes], T], copies: int = 1
) -> T:
    """Returns the result of `parse` for a body that `read_body` has returned. `parse` runs on a thread if the body
    is large. `copies`: number of copies of the body that `parse` may make; they count against the memory
    account. Raises the errors of `parse`."""
    account = body_account(request.scope)
    if len(body) <= SMALL or account is None:
        return parse(body)
    size = copies * len(body)
    account.take(size)
    return await _on_thread(account, limits.pool, partial(parse, body), lambda: account.give_back(size))


def json_object(body: bytes, example: str) -> dict[str, Any]:
    """Returns the JSON object in a body. `example`: an object for the error message. Raises InvalidJson,
    PayloadTooLarge."""
    document = parse_json(body)
    if not isinstance(document, dict):
        raise InvalidJson(f"The body must be a JSON object, such as {example}.")
    return document


def member_object(value: Any, where: str) -> Mapping[str, Any]:
    """Returns an object member, or {} for None and for an empty list, as which PHP writes an empty object. Raises
    InvalidOption for other values. ``where``: the member's name in the error."""
    if value in (None, []):
        return {}
    if not isinstance(value, dict):
        raise InvalidOption(where, "be an object")
    return value


def image_from_base64(value: Any, member: str) -> bytes:
    """Returns the bytes of an image from base64 or a base64 data URI. Raises UnprocessableImage, which names the
    member."""
    data = decode_base64(value) if isinstance(value, str) else b""
    if not data:
        detail = f"The member {member} must be base64 text or a base64 data URI"
        urls = isinstance(value, str) and is_url(value)
        elsewhere = "; POST /v1/caption and POST /v1/chat/completions take URLs" if urls else ""
        raise UnprocessableImage(f"{detail}{elsewhere}.", "not_base64")
    return data


def image_or_url(value: Any, member: str) -> bytes | str:
    """Returns an http(s) URL as it is, and anything else as `image_from_base64` does. Raises UnprocessableImage."""
    return value if isinstance(value, str) and is_url(value) else image_from_base64(value, member)


async def _on_thread(account: BodyAccount, pool: Executor, work: Callable[[], T], done: Callable[[], object]) -> T:
    """Runs work on a body on a thread and returns its result. Calls `done` when the work ends. If the caller is
    cancelled, the body stays in memory and in the account until then."""
    account.hold()

    def ended(_: object) -> None:
        done()
        account.release()

    future = asyncio.get_running_loop().run_in_executor(pool, work)
    future.add_done_callback(ended)
    return await asyncio.shield(future)


def _check_head(request: Request, limits: BodyLimits) -> bool:
    """Tells whether the request has a Content-Encoding. Checks Content-Length before the body is read.

    Raises PayloadTooLarge if the length exceeds the limit."""
    coded = False
    for name, value in request.scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limits.max_bytes:
            raise _too_large(limits)
        coded = coded or name == b"content-encoding"
    return coded


def _too_large(limits: BodyLimits) -> PayloadTooLarge:
    sentence = (
        f"The body has more than {limits.max_bytes} bytes; send a smaller image, or fewer images in one request."
    )
    return PayloadTooLarge(sentence, limit=limits.max_bytes)


def _unsupported(kind: str, others: str) -> UnsupportedMediaType:
    return UnsupportedMediaType(f"The content type {kind[:100]} is not read; send an image{others} or {JSON}.")


def codings_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """Returns the codings of a body in the order in which they were applied, without names that change nothing.

    Raises UnsupportedEncoding."""
    named = [value for name, value in headers if name == b"content-encoding"]
    if not named:
        return ()
    given = [each.strip().lower() for each in b",".join(named).decode("latin-1").split(",")]
    codings = [each for each in given if each not in _NO_CODINGS]
    for coding in codings:
        if coding not in _NAMES:
            raise UnsupportedEncoding(f"The content coding {coding[:40]!r} is not read")
    if len(codings) > _MOST_CODINGS:
        raise UnsupportedEncoding(f"More than {_MOST_CODINGS} content codings are not read")
    return tuple(_NAMES[each] for each in codings)


def decompress(body: bytes, codings: Iterable[str], limit: int, take: Callable[[int], object]) -> bytes:
    """Returns the decompressed body. `limit`: its maximum size in bytes. `take`: called with the size of each piece
    before the piece is kept; may raise to stop.

    Raises InvalidEncoding, PayloadTooLarge and the errors of `take`."""
    deadline = time.thread_time() + DECOMPRESSION_CPU_S
    pieces: Iterator[bytes] = (body[at : at + _PIECE] for at in range(0, len(body), _PIECE))
    for coding in reversed([*codings]):
        pieces = _inflate(pieces, coding, deadline)
    found = io.BytesIO()
    try:
        for piece in pieces:
            if found.tell() + len(piece) > limit:
                raise PayloadTooLarge(
                    f"The decompressed body has more than {limit} bytes; send a smaller image, or fewer images in "
                    "one request.",
                    limit=limit,
                )
            take(len(piece))
            found.write(piece)
    except zlib.error:
        raise InvalidEncoding from None
    return found.getvalue()


def _inflate(pieces: Iterator[bytes], coding: str, deadline: float) -> Iterator[bytes]:
    """Yields the decompressed pieces of one coding. Raises zlib.error, InvalidEncoding, PayloadTooLarge."""
    start = b""
    while len(start) < 2 and (piece := next(pieces, None)) is not None:
        start += piece
    head = _GZIP_HEAD if coding == _GZIP else _head_of_deflate(start)
    stream, members = zlib.decompressobj(head), 1
    for piece in chain([start], pieces):
        left, more = piece, False
        while left or more:
            if stream.eof:
                members += 1
                if coding != _GZIP or members > _MOST_MEMBERS:
                    raise InvalidEncoding
                stream = zlib.decompressobj(head)
            if time.thread_time() > deadline:
                raise PayloadTooLarge("The body takes too long to decompress; send it without Content-Encoding.")
            found = stream.decompress(left, _PIECE)
            yield found
            left = stream.unconsumed_tail or stream.unused_data
            more = len(found) == _PIECE and not stream.eof
    if not stream.eof:
        raise InvalidEncoding


def _head_of_deflate(start: bytes) -> int:
    """Returns the `wbits` for a `deflate` body. RFC 9110 requires a zlib header, which some clients leave out."""
    is_zlib = len(start) > 1 and start[0] & 15 == zlib.DEFLATED and int.from_bytes(start[:2], "big") % 31 == 0
    return _ZLIB_HEAD if is_zlib else _NO_HEAD
