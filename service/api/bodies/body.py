"""Reads a request body under the limits of its size, of its time, and of the memory of all bodies together."""

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
from snapcap.service.memory.bodies import BodyAccount, BodyBudget, body_account, open_account

T = TypeVar("T")
# A body that keeps coming at this rate is slow, not stalled. 256 kbit/s.
MIN_BYTES_PER_S = 32 << 10
# Below this, parsing costs the event loop less than handing it to a thread.
SMALL = 64 << 10


@dataclass(frozen=True)
class BodyLimits:
    """`max_bytes` of one body. `timeout`: seconds by which it may be behind 32 KiB a second at any moment.
    `total_timeout`: seconds that it may take at most. `budget`: of all bodies together."""

    max_bytes: int
    timeout: float
    total_timeout: float = math.inf
    budget: BodyBudget = field(default_factory=BodyBudget)


class BodyClock:
    """Until when the rest of a body has to arrive, in seconds of the event loop's clock.

    What comes faster than it must earns no time for later: a body that stops one byte before its end would have
    that of all its other bytes."""

    def __init__(self, limits: BodyLimits) -> None:
        now = asyncio.get_running_loop().time()
        self._timeout = limits.timeout
        self._last = now + limits.total_timeout
        self.end = min(now + limits.timeout, self._last)

    def received(self, count: int) -> None:
        """Notes that so many bytes have arrived now."""
        latest = asyncio.get_running_loop().time() + self._timeout
        self.end = min(self.end + count / MIN_BYTES_PER_S, latest, self._last)


async def read_body(request: Request, limits: BodyLimits, pool: Executor) -> bytes:
    """The whole body, decompressed, which the request's account has.

    Raises PayloadTooLarge, BodyTimeout, BodyMemoryFull, ClientDisconnected, UnsupportedEncoding and
    InvalidEncoding."""
    coded = _check_head(request, limits)
    if coded:
        from snapcap.service.api.bodies.content_coding import codings_of, decompress  # noqa: PLC0415 - few clients compress

        codings = codings_of(request.scope["headers"])
    account, clock = open_account(request.scope, limits.budget), BodyClock(limits)
    # One allocation that grows: of many small ones the allocator would give little back to the system.
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
    whole = body.getvalue()  # which is not a copy
    if not coded or not codings or not whole:
        return whole
    work = partial(decompress, whole, codings, limits.max_bytes, account.take)
    return await _on_thread(account, pool, work, lambda: account.give_back(len(whole)))


async def parse_body(
    request: Request, limits: BodyLimits, pool: Executor, parse: Callable[[bytes], T], copies: int = 1
) -> T:
    """What `parse` makes of the body: here, or on a thread where it is large. It may copy all of it so many times,
    which is counted. Raises what `read_body` and `parse` raise."""
    return await parse_received(request, await read_body(request, limits, pool), pool, parse, copies)


async def parse_received(
    request: Request, body: bytes, pool: Executor, parse: Callable[[bytes], T], copies: int = 1
) -> T:
    """Parses a body that `read_body` has read, as `parse_body` does."""
    account = body_account(request.scope)
    if len(body) <= SMALL or account is None:
        return parse(body)
    size = copies * len(body)
    account.take(size)
    return await _on_thread(account, pool, partial(parse, body), lambda: account.give_back(size))


async def read_multipart(
    request: Request, limits: BodyLimits, pool: Executor, parse: Callable[[list[Part]], T]
) -> T:
    """What `parse` makes of the parts, in their order. Raises what `read_body` and `parse` raise, and
    InvalidMultipart."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    # A part is a copy, and an image in base64 becomes another.
    return await parse_body(request, limits, pool, lambda body: parse(parse_multipart(boundary, body)), copies=2)


async def _on_thread(account: BodyAccount, pool: Executor, work: Callable[[], T], done: Callable[[], object]) -> T:
    """The result of work on a body. Whoever asks may go: the body stays, and is counted, until a thread has been
    through with it; then `done` is called."""
    account.hold()

    def ended(_: object) -> None:
        done()
        account.release()

    future = asyncio.get_running_loop().run_in_executor(pool, work)
    future.add_done_callback(ended)
    return await asyncio.shield(future)


def _check_head(request: Request, limits: BodyLimits) -> bool:
    """Whether the body may be compressed. An announced length is refused before a byte is read.

    Raises PayloadTooLarge."""
    coded = False
    for name, value in request.scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limits.max_bytes:
            raise _too_large(limits)
        coded = coded or name == b"content-encoding"
    return coded


def _too_large(limits: BodyLimits) -> PayloadTooLarge:
    sentence = f"The body is above {limits.max_bytes} bytes; send a smaller image or fewer at once."
    return PayloadTooLarge(sentence, limit=limits.max_bytes)
