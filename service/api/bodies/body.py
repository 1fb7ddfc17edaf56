"""Reads a request body under limits of its size, its time, and the memory of all bodies together."""

import asyncio
import io
import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import field
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from snapcap.models.dataclass import dataclass
from snapcap.service.api.bodies.multipart import Part, boundary_of, parse_multipart
from snapcap.service.errors import BodyTimeout, ClientDisconnected, PayloadTooLarge
from snapcap.service.memory import BodyAccount, BodyBudget, body_account, open_account

T = TypeVar("T")
# A body that keeps coming at this rate is slow, not stalled. 256 kbit/s.
MIN_BYTES_PER_S = 32 << 10
# Parsing a body of up to this size takes the event loop less time than handing it to a thread.
SMALL = 64 << 10


@dataclass(frozen=True)
class BodyLimits:
    """Holds the limits of bodies. `max_bytes`: maximum size of one body. `timeout`: seconds by which a body may lag
    behind 32 KiB a second. `total_timeout`: maximum seconds for one body. `budget`: memory of all bodies
    together."""

    max_bytes: int
    timeout: float
    total_timeout: float = math.inf
    budget: BodyBudget = field(default_factory=BodyBudget)


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


async def read_body(request: Request, limits: BodyLimits, pool: Executor) -> bytes:
    """Returns the whole body, decompressed. The body counts against the request's memory account.

    Raises PayloadTooLarge, BodyTimeout, BodyMemoryFull, ClientDisconnected, UnsupportedEncoding and
    InvalidEncoding."""
    coded = _check_head(request, limits)
    if coded:
        from snapcap.service.api.bodies.content_coding import codings_of, decompress  # noqa: PLC0415 - few clients compress

        codings = codings_of(request.scope["headers"])
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
    if not coded or not codings or not whole:
        return whole
    work = partial(decompress, whole, codings, limits.max_bytes, account.take)
    return await _on_thread(account, pool, work, lambda: account.give_back(len(whole)))


async def parse_body(
    request: Request, limits: BodyLimits, pool: Executor, parse: Callable[[bytes], T], copies: int = 1
) -> T:
    """Reads the body and returns the result of `parse`, which runs on a thread of `pool` if the body is large.

    `copies`: number of copies of the body that `parse` may make; they count against the memory account. Raises the
    errors of `read_body` and of `parse`."""
    return await parse_received(request, await read_body(request, limits, pool), pool, parse, copies)


async def parse_received(
    request: Request, body: bytes, pool: Executor, parse: Callable[[bytes], T], copies: int = 1
) -> T:
    """Returns the result of `parse` for a body that `read_body` has returned. `copies`: see `parse_body`."""
    account = body_account(request.scope)
    if len(body) <= SMALL or account is None:
        return parse(body)
    size = copies * len(body)
    account.take(size)
    return await _on_thread(account, pool, partial(parse, body), lambda: account.give_back(size))


async def read_multipart(
    request: Request, limits: BodyLimits, pool: Executor, parse: Callable[[list[Part]], T]
) -> T:
    """Returns the result of `parse` for the parts of a multipart body, in order. Raises the errors of `read_body`
    and of `parse`, InvalidMultipart, and UnsupportedMediaType."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    # Each part is a copy, and decoding an image in base64 makes another.
    return await parse_body(request, limits, pool, lambda body: parse(parse_multipart(boundary, body)), copies=2)


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
    sentence = f"The body is above {limits.max_bytes} bytes; send a smaller image or fewer at once."
    return PayloadTooLarge(sentence, limit=limits.max_bytes)
