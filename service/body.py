"""Reading a request body under three limits: its size, how long it may take, and that it is all in memory."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from service.errors import (
    BodyTimeout,
    ClientDisconnected,
    InvalidMultipart,
    PayloadTooLarge,
    UnsupportedMediaType,
)

# A body that keeps coming at this rate is slow, not stalled. 256 kbit/s.
MIN_BYTES_PER_S = 32 << 10
_MAX_PARTS = 64


@dataclass(frozen=True)
class BodyLimits:
    """`max_bytes` of one body; `timeout` in seconds, to which one second is added for each 32 KiB received."""

    max_bytes: int
    timeout: float


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The whole body. Raises PayloadTooLarge, BodyTimeout, ClientDisconnected, UnsupportedMediaType."""
    return b"".join([chunk async for chunk in stream_body(request, limits)])


async def read_multipart(request: Request, limits: BodyLimits) -> list[tuple[str, str | UploadFile]]:
    """The parts in order, files held in memory. Raises what `read_body` raises, and InvalidMultipart."""
    parser = MultiPartParser(
        request.headers, stream_body(request, limits), max_files=_MAX_PARTS, max_fields=_MAX_PARTS
    )
    # By default parts above 1 MB go to files in the temp folder, which may be read-only. The body fits in memory.
    parser.spool_max_size = limits.max_bytes + 1
    try:
        return (await parser.parse()).multi_items()
    except MultiPartException as error:
        raise InvalidMultipart(
            f"The multipart body cannot be read: {error.message.rstrip('.')}. "
            "Send it as `curl -F image=@photo.jpg` does."
        ) from None


async def stream_body(request: Request, limits: BodyLimits) -> AsyncGenerator[bytes, None]:
    """The chunks as they arrive. An announced length is refused before a byte is read; the real one is counted."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMediaType("Compressed bodies are not read; send it without Content-Encoding.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.max_bytes:
        raise _too_large(limits)
    received, more = 0, True
    start = asyncio.get_running_loop().time()
    while more:
        try:
            # Around each message, not around the loop: no timer may be left armed while the consumer runs.
            async with asyncio.timeout_at(start + limits.timeout + received / MIN_BYTES_PER_S):
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
        yield chunk


def _too_large(limits: BodyLimits) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is above {limits.max_bytes} bytes; send a smaller image or fewer at once.")
