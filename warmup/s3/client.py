"""Makes the client of S3, with bounded waits and replies, and explains an error of S3 in one line.

S3Error
└── ObjectChangedError

Functions import botocore when they need it, so that a server with a local checkpoint never imports it. boto3 is not
used: its import takes 0.05 s more, and nothing here needs it.

botocore adds a CRC32 to each upload, because S3 requires it under Object Lock; over TLS it is in a trailer of the
body. Other stores may not support this: some refuse the request, each with a different error, and some store the
trailer as part of the object. botocore's timeout bounds each read of a reply, but not the whole reply.
"""

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from snapcap.warmup.errors import os_error_text, without_passwords
from snapcap.warmup.options import S3Options

if TYPE_CHECKING:
    from botocore.awsrequest import AWSPreparedRequest, AWSResponse
    from mypy_boto3_s3 import S3Client


_CREDENTIALS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile"

_BY_CODE = {
    "NoSuchBucket": "the bucket does not exist; check its name and the endpoint",
    "NoSuchKey": "the object does not exist any more; start again",
    "NoCredentials": f"access is denied to requests without credentials, and there are none; {_CREDENTIALS}",
    "InvalidAccessKeyId": f"the access key is not known there; {_CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret key is wrong; {_CREDENTIALS}",
    "ExpiredToken": "the credentials have expired; renew them",
    "InvalidToken": f"the session token is not valid; {_CREDENTIALS}",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "PermanentRedirect": "the bucket is in another region; set the region or the endpoint",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set the region",
    "IllegalLocationConstraintException": "the bucket is in another region; set the region",
    "InvalidBucketName": "that is not a bucket name; write s3://bucket/prefix",
    "SlowDown": "S3 asks for fewer requests; try again later",
}
_DENIED = ("AccessDenied", "403")
# Permissions by operation, in botocore's names. Without s3:ListBucket, S3 denies access to missing objects.
_PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "DeleteObject": "s3:DeleteObject",
}
_READING = "s3:ListBucket and s3:GetObject"
# Services from which botocore gets credentials: for a role, as on EKS, and for a single sign-on or a login.
_OF_CREDENTIALS = ("sts", "sso", "sso-oidc", "signin")
_EMPTY = ("", "Access Denied", "Access Denied.", "AccessDenied", "Forbidden")  # texts that add nothing to the code
_CHANGED = ("PreconditionFailed", "InvalidRange", "412", "416")

# Advice by class name, because a server without S3 does not import botocore.
_BY_CLASS = {
    "NoCredentialsError": f"there are no credentials; {_CREDENTIALS}",
    "PartialCredentialsError": f"the credentials are incomplete; {_CREDENTIALS}",
    "CredentialRetrievalError": f"the credentials cannot be had; {_CREDENTIALS}",
    "ProfileNotFound": "the profile is not in the AWS configuration; check its name",
    "ParamValidationError": "that is not a bucket name; write s3://bucket/prefix",
    "InvalidRegionError": "that is not a region; check its name",
    "SSLError": "the TLS connection failed; check the endpoint and its certificate",
    "EndpointConnectionError": "cannot connect; check the endpoint and the network",
    "ConnectTimeoutError": "no connection within the connect timeout; check the endpoint and the network",
    "ReadTimeoutError": "connected, but no answer within the read timeout; check the endpoint",
    "ProxyConnectionError": "cannot connect to the proxy; check HTTPS_PROXY",
    "MissingDependencyException": "an access point of several regions needs `pip install 'botocore[crt]'`",
}
_TRANSIENT = (
    "ConnectionClosedError",
    "IncompleteReadError",
    "ProtocolError",
    "ReadTimeoutError",
    "ResponseStreamingError",
)


class S3Error(RuntimeError):
    """Says in one line why a request to S3 failed, and what to do. ``code``: S3's error code, such as
    ``NoSuchKey``, or the class name of the causing error; empty without either."""

    def __init__(self, message: str, where: str = "", code: str = "") -> None:
        super().__init__(message)
        self.where = where
        self.code = code


class ObjectChangedError(S3Error):
    """Says that an object was replaced after it was listed."""

    def __init__(self, where: str, code: str = "") -> None:
        super().__init__(f"{where}: the object was replaced during the download; start again", where, code)


@contextlib.contextmanager
def translated(where: str, local: Path | None = None) -> Iterator[None]:
    """Turn every error of botocore, the network and the disk into an ``S3Error`` about ``where``. ``local``: the
    destination file, which an error of the disk names."""
    try:
        yield
    except _expected() as error:
        raise _s3_error(error, where, local) from error


def is_transient(error: S3Error) -> bool:
    """Returns whether a connection broke off while bytes arrived. botocore does not retry such an error."""
    return error.code in _TRANSIENT


def _expected() -> tuple[type[Exception], ...]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    # ValueError: the endpoint is no URL. KeyError: a reply lacks a member that every reply has.
    return BotoCoreError, ClientError, OSError, ValueError, KeyError


def _s3_error(error: Exception, where: str, local: Path | None) -> S3Error:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # a ClientError
        code = str(response.get("Error", {}).get("Code", ""))
        if code in _CHANGED:
            return ObjectChangedError(where, code)
        return S3Error(f"{where}: {_refusal(code, response, getattr(error, 'operation_name', ''))}", where, code)
    name = type(error).__name__
    advice = _BY_CLASS.get(name)
    if advice is None and isinstance(error, OSError):
        text = f"cannot be written to {local}: {os_error_text(error)}" if local else os_error_text(error)
        return S3Error(f"{where}: {text}", where, name)
    return S3Error(f"{where}: {advice or 'the request failed'} ({name}: {_line(error)})", where, name)


def name_missing_credentials(parsed: Any, **_: object) -> None:
    """Handles botocore's events for a client without credentials: gives a refusal the code ``NoCredentials``."""
    if parsed.get("Error", {}).get("Code") in _DENIED:
        parsed["Error"]["Code"] = "NoCredentials"


def _refusal(code: str, response: Mapping[str, Any], operation: str) -> str:
    """Describes a refusal of S3: with advice if the code is known, else with S3's own message."""
    said = _line(response.get("Error", {}).get("Message") or "")
    if operation.startswith("AssumeRole"):
        return f"the role cannot be assumed; check its trust policy and the token ({code}: {said})"
    if code in _DENIED:
        told = f"access is denied; give the role {_PERMISSIONS.get(operation, _READING)}, or {_CREDENTIALS}"
        return f"{told} ({code}{'' if said in _EMPTY else f': {said}'})"
    if code in _BY_CODE:
        return f"{_BY_CODE[code]} ({code})"
    return f"S3 refused the request ({code}{': ' if said else ''}{said})"


def _line(text: object) -> str:
    """Returns the beginning of an untrusted text, on one line."""
    shown = without_passwords(" ".join(str(text).split()))  # botocore's errors name the endpoint's whole URL
    return "".join(each if each.isprintable() else " " for each in shown[:300])


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
_SIGNATURE = "SignatureDoesNotMatch"  # error code of a server that signs other headers than botocore
_logger = logging.getLogger("snapcap.store")
T = TypeVar("T")


def split_uri(uri: str) -> tuple[str, str]:
    """``s3://bucket/some/prefix/`` -> ``("bucket", "some/prefix")``; an access point's ARN may be the bucket.
    Raises S3Error if the URI names no bucket."""
    found = _URI.fullmatch(uri) if uri.isprintable() else None
    if found is None:
        shown = re.sub("//[^/]*@", "//…@", uri)[:200]  # the URI may contain a password
        raise S3Error(f"{shown!r} is not an S3 address; write s3://bucket/prefix, or s3://ARN/prefix")
    return found["bucket"], (found["prefix"] or "").strip("/")


def client(options: S3Options) -> "S3Client":
    """Returns a thread-safe client with bounded waits and replies. Without credentials it sends unsigned requests,
    which a public bucket accepts. Raises S3Error if the profile or the endpoint of the options is invalid."""
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
        response_checksum_validation=ON_DEMAND,  # ranged reads have no checksum
    )
    with translated("S3"):
        session = Session(profile=options.profile)
        # Otherwise botocore would search a thousand folders to list the services.
        loader: Any = create_loader(session.get_config_variable("data_path"))
        loader.list_available_services = lambda type_name: ["s3", *_OF_CREDENTIALS]
        session.register_component("data_loader", loader)
        session.set_default_client_config(config)  # clients of these services have the same bounds
        # botocore itself reads AWS_DEFAULT_REGION only; AWS sets AWS_REGION in its containers.
        region = session.get_config_variable("region") or os.environ.get("AWS_REGION") or options.region
        if region:
            session.set_config_variable("region", region)
        anonymous = session.get_credentials() is None
        if anonymous:
            config = config.merge(Config(signature_version=UNSIGNED))
        made = session.create_client(
            "s3", options.region or region, endpoint_url=options.endpoint_url, config=config
        )
        s3 = cast("S3Client", made)
        bound_replies(s3, options.deadline)
        if anonymous:
            s3.meta.events.register("after-call.s3", name_missing_credentials)
        return s3


def upload_checked(s3: "S3Client", send: Callable[[], T], is_whole: Callable[[], bool] | None = None) -> T:
    """Send an upload. If the store may have refused it because of checksums, send it again without them; if that
    succeeds, all later uploads of this client have no checksums. Raises ClientError if the store refuses the upload
    with and without checksums; the error is that of the first try.

    Args:
        send: sends the whole request.
        is_whole: asks the store whether the object has the size that was sent.
    """
    from botocore.exceptions import ClientError  # noqa: PLC0415

    config: Any = s3.meta.config
    if config.request_checksum_calculation != ALWAYS:
        return send()
    refusal: Exception | None = None
    try:
        sent = send()
    except ClientError as error:
        response: Any = error.response
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if status not in _STATUSES and response.get("Error", {}).get("Code") != _SIGNATURE:
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
    _logger.info("the store does not support checksums", extra={"fields": {"reason": reason}})
    return sent


MAX_REPLY_BYTES = 8 * 1024 * 1024  # a listing's page has 1,000 keys of up to 1,024 bytes, three times that quoted
_CHUNK_BYTES = 64 * 1024


def bound_replies(s3: "S3Client", seconds: float) -> None:
    """Bound each listing, upload receipt and error of this client to 8 MiB and ``seconds``. An object's body is
    streamed, and its reader bounds it."""
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
        return AWSResponse(reply.url, reply.status_code, headers, SimpleNamespace(stream=lambda: [content]))

    events: Any = s3.meta.events  # botocore uses a handler's return value in place of sending
    events.register("before-send.s3", send)


class Ending:
    """Ends present and later reads on all threads, by shutting their connections down. Otherwise a server that
    sends one byte at a time could prolong a read for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Any] = set()
        self.over = False

    @contextlib.contextmanager
    def reading(self, body: Any) -> Iterator[None]:
        """Allow reads of a ``StreamingBody`` inside the block, and close it afterwards."""
        with body as raw:
            with self._lock:
                self._open.add(raw)
                if self.over:
                    _hang_up(raw)
            try:
                yield
            finally:
                with self._lock:
                    self._open.discard(raw)

    def end(self) -> None:
        """End all reads."""
        with self._lock:
            self.over = True
            for raw in self._open:
                _hang_up(raw)


def _read(raw: Any, url: str, until: float) -> bytes:
    from botocore.exceptions import ConnectionClosedError, ReadTimeoutError  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415
    from urllib3.exceptions import ReadTimeoutError as TimeoutInReadError  # noqa: PLC0415

    read = raw.read1  # returns the bytes that have arrived; `read` would wait for all
    content = bytearray()
    try:
        while chunk := read(_CHUNK_BYTES):
            content += chunk
            if len(content) > MAX_REPLY_BYTES or time.monotonic() >= until:
                raise S3Error(f"{without_passwords(url)}: the reply does not end; check the endpoint")
    except TimeoutInReadError as error:
        raise ReadTimeoutError(endpoint_url=url, error=error) from error
    except HTTPError as error:
        raise ConnectionClosedError(endpoint_url=url, error=error) from error
    return bytes(content)


def _hang_up(raw: Any) -> None:
    # Closing would not end a running read. A reply that was read to its end has no connection.
    with (
        contextlib.suppress(OSError, ValueError, AttributeError),
        socket.socket(fileno=os.dup(raw.fileno())) as connection,
    ):
        connection.shutdown(socket.SHUT_RDWR)
