"""Bounds what an S3 server answers: botocore waits for each read of a reply, but not for its end."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snapcap.warmup.s3.errors import S3Error

if TYPE_CHECKING:
    from botocore.awsrequest import AWSPreparedRequest, AWSResponse
    from mypy_boto3_s3 import S3Client

MAX_REPLY_BYTES = 8 * 1024 * 1024  # a page of a listing: 1,000 keys of up to 1,024 bytes, thrice that when quoted
_CHUNK_BYTES = 64 * 1024


def bound_replies(s3: "S3Client", seconds: float) -> None:
    """Bound each listing, receipt and error of this client to 8 MiB and ``seconds``. The body of an object is
    streamed: its reader bounds it."""
    session: Any = s3._endpoint.http_session  # type: ignore[attr-defined]

    def send(request: "AWSPreparedRequest", **_: object) -> "AWSResponse":
        from botocore.awsrequest import AWSResponse  # noqa: PLC0415 - see warmup/s3/download.py

        until = time.monotonic() + seconds
        asked_for, request.stream_output = request.stream_output, True
        reply: AWSResponse = session.send(request)
        if asked_for and reply.status_code < 300:
            return reply
        with contextlib.closing(reply.raw):
            content = _read(reply.raw, request.url, until)
        headers: Any = reply.headers
        return AWSResponse(reply.url, reply.status_code, headers, _Content(content))

    events: Any = s3.meta.events  # botocore uses a handler's return value in place of sending
    events.register("before-send.s3", send)


class Connections:
    """The connections that bodies come in on, which another thread can end: a read takes as long as a server likes
    that sends one byte at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Any] = set()
        self._ended = False

    @contextlib.contextmanager
    def reading(self, body: Any) -> Iterator[None]:
        """Read a ``StreamingBody``, which is closed afterwards."""
        with body as raw:
            with self._lock:
                self._open.add(raw)
                if self._ended:
                    _hang_up(raw)
            try:
                yield
            finally:
                with self._lock:
                    self._open.discard(raw)

    def end(self) -> None:
        """End all, and those that are still to come."""
        with self._lock:
            self._ended = True
            for raw in self._open:
                _hang_up(raw)


class _Content:
    """Holds the bytes of a reply for botocore to read."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self) -> Iterator[bytes]:
        yield self._content


def _read(raw: Any, url: str, until: float) -> bytes:
    from botocore.exceptions import ConnectionClosedError, ReadTimeoutError  # noqa: PLC0415 - see warmup/s3/download.py
    from urllib3.exceptions import HTTPError  # noqa: PLC0415
    from urllib3.exceptions import ReadTimeoutError as TimeoutInReadError  # noqa: PLC0415

    read = raw.read1  # returns what has come by now, where `read` waits for all
    content = bytearray()
    try:
        while chunk := read(_CHUNK_BYTES):
            content += chunk
            if len(content) > MAX_REPLY_BYTES or time.monotonic() >= until:
                raise S3Error(f"{url}: the reply does not end; check the endpoint")
    except TimeoutInReadError as error:
        raise ReadTimeoutError(endpoint_url=url, error=error) from error
    except HTTPError as error:
        raise ConnectionClosedError(endpoint_url=url, error=error) from error
    return bytes(content)


def _hang_up(raw: Any) -> None:
    # Closing would leave a read that is under way waiting. A reply that was read to its end has no connection.
    with (
        contextlib.suppress(OSError, ValueError, AttributeError),
        socket.socket(fileno=os.dup(raw.fileno())) as connection,
    ):
        connection.shutdown(socket.SHUT_RDWR)
