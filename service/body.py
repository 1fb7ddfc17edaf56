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
    body = _Incoming(request, limits)
    chunks = []
    while body.more:
        chunks.append(await body.chunk())
    return b"".join(chunks)


async def read_multipart(request: Request, limits: BodyLimits) -> list[tuple[str, str | UploadFile]]:
    """The parts in order, files held in memory. Raises what `read_body` raises, and InvalidMultipart."""
    parser = MultiPartParser(request.headers, _chunks(request, limits), max_files=_MAX_PARTS, max_fields=_MAX_PARTS)
    # By default parts above 1 MB go to files in the temp folder, which may be read-only. The body fits in memory.
    parser.spool_max_size = limits.max_bytes + 1
    try:
        return (await parser.parse()).multi_items()
    except MultiPartException as error:
        raise InvalidMultipart(
            f"The multipart body cannot be read: {error.message.rstrip('.')}. "
            "Send it as `curl -F image=@photo.jpg` does."
        ) from None


class _Incoming:
    """The chunks as they arrive. An announced length is refused before a byte is read; the real one is counted."""

    def __init__(self, request: Request, limits: BodyLimits) -> None:
        """Raises PayloadTooLarge, UnsupportedMediaType."""
        for name, value in request.scope["headers"]:
            if name == b"content-encoding" and value != b"identity":
                raise UnsupportedMediaType("Compressed bodies are not read; send it without Content-Encoding.")
            if name == b"content-length" and value.isdigit() and int(value) > limits.max_bytes:
                raise _too_large(limits)
        self.more = True
        self._receive = request.receive
        self._limits = limits
        self._received = 0
        self._end = asyncio.get_running_loop().time() + limits.timeout

    async def chunk(self) -> bytes:
        """The next one. Raises PayloadTooLarge, BodyTimeout, ClientDisconnected."""
        try:
            # Around each message: no timer may be left armed while the consumer runs.
            async with asyncio.timeout_at(self._end + self._received / MIN_BYTES_PER_S):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeout(f"The body stalled after {self._received} bytes; send it faster.") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        self.more = message.get("more_body", False)
        self._received += len(chunk)
        if self._received > self._limits.max_bytes:
            raise _too_large(self._limits)
        return chunk


async def _chunks(request: Request, limits: BodyLimits) -> AsyncGenerator[bytes, None]:
    body = _Incoming(request, limits)
    while body.more:
        yield await body.chunk()


def _too_large(limits: BodyLimits) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is above {limits.max_bytes} bytes; send a smaller image or fewer at once.")
