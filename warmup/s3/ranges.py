"""Reads ranges of an S3 object, from several threads, until a deadline."""

import threading
import time
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass
from snapcap.warmup.s3.errors import ObjectChangedError, S3Error, is_transient, translated
from snapcap.warmup.s3.replies import Connections

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectRequestTypeDef

ATTEMPTS = 3
_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class S3Object:
    """Describes an object of a listing; ``size`` in bytes, ``etag`` as S3 writes it, with its quotes.

    An empty ``etag`` accepts any version: for objects that are named by their digest, which the caller checks.
    """

    key: str
    size: int
    etag: str


@dataclass(frozen=True)
class Ending:
    """Ends reads on all threads: those under way, whose connections it hangs up on, and those to come."""

    stop: threading.Event = field(default_factory=threading.Event)
    connections: Connections = field(default_factory=Connections)

    def end(self) -> None:
        self.stop.set()
        self.connections.end()


@dataclass(frozen=True)
class Ranges:
    """Reads ranges of an object. ``deadline``: the moment of ``time.monotonic()`` after which nothing is read.
    ``ending``: ends a read that hangs."""

    s3: "S3Client"
    bucket: str
    source: S3Object
    deadline: float
    ending: Ending

    @property
    def where(self) -> str:
        return f"s3://{self.bucket}/{self.source.key}"

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Bytes [start, end) in pieces; where a read breaks off the next one goes on.

        Raises:
            ObjectChangedError: the object is not the one that was listed, or not of its size.
            S3Error: anything else that S3 or the network refuses, or it is too late.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with translated(self.where):
                    for piece in self._pieces(start, end):
                        start += len(piece)
                        yield piece
            except S3Error as error:
                if attempt == ATTEMPTS or not is_transient(error):
                    raise
            if start == end:
                return
        raise S3Error(f"{self.where}: the server sent fewer bytes than it announced; try again")

    def _pieces(self, start: int, end: int) -> Iterator[bytes]:
        source = self.source
        self._check()
        request: GetObjectRequestTypeDef = {
            "Bucket": self.bucket,
            "Key": source.key,
            "Range": f"bytes={start}-{end - 1}",
        }
        if source.etag:
            request["IfMatch"] = source.etag
        reply = self.s3.get_object(**request)
        # A server without If-Match or Range would answer with other bytes, and say so.
        expected = f"bytes {start}-{end - 1}/{source.size}"
        if (
            reply.get("ETag") != (source.etag or reply.get("ETag"))
            or reply.get("ContentRange", expected) != expected
        ):
            raise ObjectChangedError(self.where)
        if reply.get("ContentLength") != end - start:
            raise S3Error(f"{self.where}: the server does not answer ranged reads; use one that does")
        with self.ending.connections.reading(reply["Body"]):
            for piece in reply["Body"].iter_chunks(_PIECE_BYTES):
                self._check()
                yield piece

    def _check(self) -> None:
        if self.ending.stop.is_set():
            raise S3Error(f"{self.where}: the download was given up")
        check_deadline(self.deadline, self.where)


def check_deadline(deadline: float, where: str) -> None:
    """Raises S3Error when it is too late."""
    if time.monotonic() >= deadline:
        raise deadline_error(where)


def deadline_error(where: str) -> S3Error:
    """Makes the error of a download that missed its deadline."""
    return S3Error(f"{where}: the download did not finish before its deadline; raise it or check the network")
