"""Translates what goes wrong with S3 into one line that says what to do.

S3Error
└── ObjectChangedError
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from snapcap.warmup.errors import os_error_text

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
# By operation, of which boto3's names are; without s3:ListBucket S3 denies objects that are missing.
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
_EMPTY = ("", "Access Denied", "Access Denied.", "AccessDenied", "Forbidden")  # texts that add nothing to the code
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
    """Returns whether a connection broke off while bytes arrived. botocore does not retry such an error."""
    return type(error.__cause__).__name__ in _TRANSIENT


def _expected() -> tuple[type[Exception], ...]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    # The last two: an endpoint that is no URL; a reply without what every reply has.
    return BotoCoreError, ClientError, OSError, ValueError, KeyError


def _s3_error(error: Exception, where: str, local: Path | None) -> S3Error:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # a ClientError
        code = str(response.get("Error", {}).get("Code", ""))
        if code in _CHANGED:
            return ObjectChangedError(where)
        return S3Error(f"{where}: {_refusal(code, response, getattr(error, 'operation_name', ''))}", where)
    name = type(error).__name__
    advice = _BY_CLASS.get(name)
    if advice is None and isinstance(error, OSError):
        wrong = os_error_text(error)
        return S3Error(f"{where}: cannot be written to {local}: {wrong}" if local else f"{where}: {wrong}", where)
    text = _line(error)
    return S3Error(f"{where}: {advice or 'the request failed'} ({name}: {text})", where)


def name_missing_credentials(parsed: Any, **_: object) -> None:
    """A handler of botocore's for a client that has no credentials: a refusal gets the code ``NoCredentials``."""
    if parsed.get("Error", {}).get("Code") in _DENIED:
        parsed["Error"]["Code"] = "NoCredentials"


def _refusal(code: str, response: Mapping[str, Any], operation: str) -> str:
    """Describes a refusal of S3: with advice if the code is known, else with S3's own message."""
    said = _line(response.get("Error", {}).get("Message") or "")
    if code in _DENIED:
        told = f"access is denied; give the role {_PERMISSIONS.get(operation, _READING)}, or {_CREDENTIALS}"
        return f"{told} ({code}{'' if said in _EMPTY else f': {said}'})"
    if code in _BY_CODE:
        return f"{_BY_CODE[code]} ({code})"
    return f"S3 refused the request ({code}{': ' if said else ''}{said})"


def _line(text: object) -> str:
    """The beginning of a text that somebody else wrote, on one line."""
    return "".join(each if each.isprintable() else " " for each in " ".join(str(text).split())[:300])
