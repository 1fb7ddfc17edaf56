"""Downloads objects from S3: listings, and parallel ranged reads within a deadline."""

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.files import free_bytes, locked_alone, make_folder, remove_left, take_lock, write_all
from snapcap.warmup.s3.client import (
    ATTEMPTS,
    WORKERS,
    Ending,
    ObjectChangedError,
    S3Error,
    is_transient,
    translated,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectRequestTypeDef

_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class S3Object:
    """Describes an object of a listing. ``size``: bytes. ``etag``: as S3 writes it, with its quotes.

    An empty ``etag`` accepts any version, for objects whose name is a digest that the caller verifies."""

    key: str
    size: int
    etag: str


@dataclass(frozen=True)
class ObjectRanges:
    """Reads ranges of an object. ``deadline``: the moment of ``time.monotonic()`` after which reads fail.
    ``ending``: ends a read that hangs."""

    s3: "S3Client"
    bucket: str
    source: S3Object
    deadline: float
    ending: Ending = field(default_factory=Ending)

    @property
    def where(self) -> str:
        return f"s3://{self.bucket}/{self.source.key}"

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yields bytes [start, end) in pieces. If a connection breaks, a new request continues the read. Raises
        ObjectChangedError if the object was replaced after it was listed, or has another size, and S3Error for
        any other error of S3 or the network, or after the deadline."""
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
        # A server that ignores If-Match or Range sends other bytes, as its headers show.
        expected = f"bytes {start}-{end - 1}/{source.size}"
        if (
            reply.get("ETag") != (source.etag or reply.get("ETag"))
            or reply.get("ContentRange", expected) != expected
        ):
            raise ObjectChangedError(self.where)
        if reply.get("ContentLength") != end - start:
            raise S3Error(f"{self.where}: the server does not answer ranged reads; use one that does")
        with self.ending.reading(reply["Body"]):
            for piece in reply["Body"].iter_chunks(_PIECE_BYTES):
                self._check()
                yield piece

    def _check(self) -> None:
        if self.ending.over:
            raise S3Error(f"{self.where}: the download was given up")
        check_deadline(self.deadline, self.where)


def check_deadline(deadline: float, where: str) -> None:
    """Raises S3Error if the deadline has passed."""
    if time.monotonic() >= deadline:
        raise deadline_error(where)


def deadline_error(where: str) -> S3Error:
    """Makes the error of a download that missed its deadline."""
    return S3Error(f"{where}: the download did not finish before its deadline; raise it or check the network")


PART_BYTES = 8 * 1024 * 1024
_LISTED = 10_000
_PART = re.compile(r"\..+\.[0-9a-f]{32}\.part", re.DOTALL)


def list_objects(s3: "S3Client", bucket: str, prefix: str, deadline: float) -> list[S3Object]:
    """Returns the objects directly under a prefix, without those in subfolders. Raises S3Error if the listing
    failed, took too long, or has over 10,000 objects.

    Args:
        prefix: without a slash at its end; empty for the whole bucket.
        deadline: the moment of ``time.monotonic()`` to give up at, checked between pages.
    """
    where = f"s3://{bucket}/{prefix}"
    start = f"{prefix}/" if prefix else ""
    found: list[S3Object] = []
    with translated(where):
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=start, Delimiter="/")
        for page in pages:
            found += [S3Object(o["Key"], o["Size"], o["ETag"]) for o in page.get("Contents", ())]
            if len(found) > _LISTED:
                raise S3Error(f"{where}: there are over {_LISTED} objects; give the prefix of one checkpoint")
            check_deadline(deadline, where)
    return [entry for entry in found if entry.key != start]


def download(s3: "S3Client", bucket: str, items: Mapping[Path, S3Object], deadline: float) -> Iterator[Path]:
    """Download objects in parallel ranges, and yield the path of each file when it is complete and in place.

    Every range requests the ETag of the listing, so a file never mixes two versions of an object. A file gets its
    name only when it is complete. The caller verifies the content, and syncs the file if it must survive a power
    cut.

    Args:
        items: the object of each file.
        deadline: the moment of ``time.monotonic()`` to give up at, even inside a read that never returns.

    Raises:
        ObjectChangedError: an object was replaced after it was listed.
        S3Error: any other error of S3, the network or the disk. Complete files stay.
    """
    pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="s3")
    ending = Ending()
    jobs = [_Job(path, ObjectRanges(s3, bucket, source, deadline, ending)) for path, source in items.items()]
    try:
        for job in jobs:
            job.start(pool)
        for job in jobs:
            job.finish()
            yield job.dest
    finally:
        ending.end()
        # No wait: a request to a dead host ends by its own timeout, after the failure was reported.
        pool.shutdown(wait=False, cancel_futures=True)
        for job in jobs:
            job.discard()


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files of killed downloads from a folder. Files of running downloads stay. Raises OSError if
    the folder cannot be read."""
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            with contextlib.suppress(OSError), locked_alone(path) as alone:
                if alone is not False:
                    remove_left([path], alone)


@dataclass
class _Job:
    """Downloads an object into a temporary file beside its destination.

    s3transfer is not used, because it has no deadline: its manager waits until its threads end, and nothing can
    close the connection that a thread reads from. Its manager does not check the disk's free space either."""

    dest: Path
    ranges: ObjectRanges
    parts: list[Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary = self.dest.with_name(f".{self.dest.name}.{uuid4().hex}.part")
        self.where = self.ranges.where
        self._held: int | None = None  # the locked descriptor: an unlocked temporary file counts as abandoned

    def start(self, pool: ThreadPoolExecutor) -> None:
        size = self.ranges.source.size
        with translated(self.where, local=self.dest):
            make_folder(self.temporary.parent, 0o755)
            self._held = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            take_lock(self._held)
            if size > free_bytes(self._held):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._held, size)
        for offset in range(0, size, PART_BYTES):
            self.parts.append(pool.submit(self._part, offset, min(offset + PART_BYTES, size)))

    def finish(self) -> None:
        remaining = max(0.0, self.ranges.deadline - time.monotonic())
        done, pending = wait(self.parts, remaining, FIRST_EXCEPTION)
        for part in done:
            part.result()
        if pending:
            raise deadline_error(self.where)
        with translated(self.where, local=self.dest):
            if self.temporary.stat().st_size != self.ranges.source.size:
                raise OSError(errno.EIO, "another process has changed the file")
            os.replace(self.temporary, self.dest)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _part(self, start: int, end: int) -> None:
        """Download bytes [start, end) of the object."""
        with translated(self.where, local=self.dest), self.temporary.open("rb+", buffering=0) as file:
            for chunk in self.ranges.read(start, end):
                write_all(file.fileno(), chunk, start)
                start += len(chunk)
