"""Translates what goes wrong with S3 into one line that says what to do.

S3Error
└── ObjectChangedError
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from snapcap.warmup.errors import os_error_text

_CREDENTIALS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile"

_BY_CODE = {
    "NoSuchBucket": "the bucket does not exist; check its name and the endpoint",
    "NoSuchKey": "the object does not exist any more; start again",
    "AccessDenied": f"access is denied; give the role s3:ListBucket and s3:GetObject, or {_CREDENTIALS}",
    "403": f"access is denied; give the role s3:ListBucket and s3:GetObject, or {_CREDENTIALS}",
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
_CHANGED = ("PreconditionFailed", "InvalidRange", "412", "416")

# By class name, as botocore is not imported for a server that reads no S3.
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
}
_TRANSIENT = (
    "ConnectionClosedError",
    "IncompleteReadError",
    "ProtocolError",
    "ReadTimeoutError",
    "ResponseStreamingError",
)


class S3Error(RuntimeError):
    """A request to S3 that failed; one line that says what to do."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where

    @property
    def code(self) -> str:
        """S3's name for the refusal, such as ``NoSuchKey``, or that of the error below; empty without either."""
        response = getattr(self.__cause__, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        return "" if self.__cause__ is None else type(self.__cause__).__name__


class ObjectChangedError(S3Error):
    """An object is not the one that was listed."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: the object was replaced during the download; start again", where)


@contextlib.contextmanager
def translated(where: str, local: Path | None = None) -> Iterator[None]:
    """Turn every error of boto3, the network and the disk into an ``S3Error`` about ``where``.

    Args:
        local: the file that it becomes, where it is the disk that fails.
    """
    try:
        yield
    except _expected() as error:
        raise _s3_error(error, where, local) from error


def is_transient(error: S3Error) -> bool:
    """Whether a connection broke off while bytes came, which botocore does not retry."""
    return type(error.__cause__).__name__ in _TRANSIENT


def _expected() -> tuple[type[Exception], ...]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - see warmup/s3/download.py

    # The last two: an endpoint that is no URL; a reply without what every reply has.
    return BotoCoreError, ClientError, OSError, ValueError, KeyError


def _s3_error(error: Exception, where: str, local: Path | None) -> S3Error:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # a ClientError
        code = str(response.get("Error", {}).get("Code", ""))
        if code in _CHANGED:
            return ObjectChangedError(where)
        return S3Error(f"{where}: {_BY_CODE.get(code, 'S3 refused the request')} ({code})", where)
    name = type(error).__name__
    advice = _BY_CLASS.get(name)
    if advice is None and isinstance(error, OSError):
        wrong = os_error_text(error)
        return S3Error(f"{where}: cannot be written to {local}: {wrong}" if local else f"{where}: {wrong}", where)
    text = " ".join(str(error).split())[:200]
    return S3Error(f"{where}: {advice or 'the request failed'} ({name}: {text})", where)
