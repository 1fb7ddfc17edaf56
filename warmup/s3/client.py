"""Makes the client of S3: with bounded waits and replies, and with checksums where the store takes them.

botocore is imported by the functions that need it, so that a server with a local checkpoint never pays for it; not
boto3 over it, which takes 0.05 s more of a start from S3, for nothing that is used here.

botocore adds a CRC32 to each upload, which S3 asks for under Object Lock, over TLS in a trailer of the body.
Stores of other makers may not know that: some refuse the request, each with an error of its own, and some keep the
trailer as part of the object. botocore waits for each read of a reply, but not for its end.
"""

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.errors import S3Error, name_missing_credentials, translated

if TYPE_CHECKING:
    from botocore.awsrequest import AWSPreparedRequest, AWSResponse
    from mypy_boto3_s3 import S3Client

ATTEMPTS = 3  # the most attempts at a request, and at a read that breaks off
WORKERS = 8  # ranges that are read at once
# A bucket's name, or an ARN: of an access point, one of several regions, of Object Lambda or on Outposts.
_ARN = (
    r"arn:aws[a-z-]*:(?:s3|s3-object-lambda):[a-z0-9-]*:[0-9]{12}:accesspoint[:/][A-Za-z0-9._-]{1,255}"
    r"|arn:aws[a-z-]*:s3-outposts:[a-z0-9-]+:[0-9]{12}:outpost[:/][A-Za-z0-9-]{1,63}"
    r"[:/](?:accesspoint|bucket)[:/][A-Za-z0-9._-]{1,63}"
)
_URI = re.compile(rf"s3://(?P<bucket>[A-Za-z0-9._-]{{1,255}}|{_ARN})(?:/(?P<prefix>.*))?")
ALWAYS: Final = "when_supported"
ON_DEMAND: Final = "when_required"
_STATUSES = (400, 411, 415, 417, 422, 501)  # statuses of a server that does not understand a request
_SIGNATURE = "SignatureDoesNotMatch"  # error code of a server that signs other headers
_logger = logging.getLogger("snapcap.store")
T = TypeVar("T")


def split_uri(uri: str) -> tuple[str, str]:
    """``s3://bucket/some/prefix/`` -> ``("bucket", "some/prefix")``; an access point's ARN may be the bucket.

    Raises:
        S3Error: the URI names no bucket.
    """
    found = _URI.fullmatch(uri) if uri.isprintable() else None
    if found is None:
        shown = re.sub("//[^/]*@", "//…@", uri)[:200]  # somebody may have written a secret there
        raise S3Error(f"{shown!r} is not an S3 address; write s3://bucket/prefix, or s3://ARN/prefix")
    return found["bucket"], (found["prefix"] or "").strip("/")


def client(options: S3Options) -> "S3Client":
    """A thread-safe client with bounded waits and replies. Without credentials it does not sign its requests, as
    a public bucket does not ask for that.

    Raises:
        S3Error: the options name a profile or an endpoint that cannot be.
    """
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415
    from botocore.loaders import create_loader  # noqa: PLC0415
    from botocore.session import Session  # noqa: PLC0415

    config = Config(
        connect_timeout=options.connect_timeout,
        # All attempts at a host that never answers must end before the deadline, also those of a listing.
        read_timeout=min(options.read_timeout, options.deadline / ATTEMPTS),
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=2 * WORKERS,
        request_checksum_calculation=ALWAYS,
        response_checksum_validation=ON_DEMAND,  # a ranged read has none to check
    )
    with translated("S3"):
        session = Session(profile=options.profile)
        # botocore would list the services by a walk through a thousand folders of descriptions.
        loader: Any = create_loader(session.get_config_variable("data_path"))
        loader.list_available_services = lambda type_name: ["s3"]
        session.register_component("data_loader", loader)
        anonymous = session.get_credentials() is None
        if anonymous:
            config = config.merge(Config(signature_version=UNSIGNED))
        made = session.create_client("s3", options.region, endpoint_url=options.endpoint_url, config=config)
        s3 = cast("S3Client", made)
        bound_replies(s3, options.deadline)
        if anonymous:
            s3.meta.events.register("after-call.s3", name_missing_credentials)
        return s3


def upload_checked(s3: "S3Client", send: Callable[[], T], is_whole: Callable[[], bool] | None = None) -> T:
    """Send an upload, and once more without checksums where they may be what the store refuses. If they are, all
    later uploads of this client go without.

    Args:
        send: makes the request, from the beginning.
        is_whole: asks whether the store has the object as it was sent.

    Raises:
        ClientError: the store refuses it with and without checksums; it is what was said of the first.
    """
    from botocore.exceptions import ClientError  # noqa: PLC0415

    config: Any = s3.meta.config
    if config.request_checksum_calculation != ALWAYS:
        return send()
    refusal: Exception | None = None
    try:
        sent = send()
    except ClientError as error:
        if not _may_be_refusal(error.response):
            raise
        refusal = error
    else:
        if is_whole is None or is_whole():
            return sent
    config.request_checksum_calculation = ON_DEMAND
    try:
        sent = send()
    except ClientError as error:
        config.request_checksum_calculation = ALWAYS
        raise (refusal or error) from None
    reason = str(refusal) if refusal else "it keeps them in the object"
    _logger.info("the store takes no checksums", extra={"fields": {"reason": reason}})
    return sent


def _may_be_refusal(response: Any) -> bool:
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status in _STATUSES or response.get("Error", {}).get("Code") == _SIGNATURE


MAX_REPLY_BYTES = 8 * 1024 * 1024  # a page of a listing: 1,000 keys of up to 1,024 bytes, thrice that when quoted
_CHUNK_BYTES = 64 * 1024


def bound_replies(s3: "S3Client", seconds: float) -> None:
    """Bound each listing, receipt and error of this client to 8 MiB and ``seconds``. The body of an object is
    streamed: its reader bounds it."""
    session: Any = s3._endpoint.http_session  # type: ignore[attr-defined]

    def send(request: "AWSPreparedRequest", **_: object) -> "AWSResponse":
        from botocore.awsrequest import AWSResponse  # noqa: PLC0415

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
    from botocore.exceptions import ConnectionClosedError, ReadTimeoutError  # noqa: PLC0415
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
