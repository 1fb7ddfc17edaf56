"""Sends uploads with checksums, which S3 asks for under Object Lock, and without to a store that refuses them.

botocore adds a CRC32 to each upload, over TLS in a trailer of the body. Stores of other makers may not know that:
some refuse the request, each with an error of its own, and some keep the trailer as part of the object.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ALWAYS: Final = "when_supported"
ON_DEMAND: Final = "when_required"
_STATUSES = (400, 411, 415, 417, 422, 501)  # statuses of a server that does not understand a request
_SIGNATURE = "SignatureDoesNotMatch"  # error code of a server that signs other headers
_logger = logging.getLogger("snapcap.store")
T = TypeVar("T")


def upload_checked(s3: "S3Client", send: Callable[[], T], is_whole: Callable[[], bool] | None = None) -> T:
    """Send an upload, and once more without checksums where they may be what the store refuses. If they are, all
    later uploads of this client go without.

    Args:
        send: makes the request, from the beginning.
        is_whole: asks whether the store has the object as it was sent.

    Raises:
        ClientError: the store refuses it with and without checksums; it is what was said of the first.
    """
    from botocore.exceptions import ClientError  # noqa: PLC0415 - see warmup/s3/download.py

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
