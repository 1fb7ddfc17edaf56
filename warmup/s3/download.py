"""Downloads objects from S3: the client, listings, and parallel ranged reads within a deadline.

botocore is imported by the functions that need it, so that a server with a local checkpoint never pays for it; not
boto3 over it, which takes 0.05 s more of a start from S3, for nothing that is used here.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.files import free_bytes, locked_alone, make_folder, take_lock, write_all
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.checksums import ALWAYS, ON_DEMAND
from snapcap.warmup.s3.errors import S3Error, name_missing_credentials, translated
from snapcap.warmup.s3.ranges import ATTEMPTS, Ending, Ranges, S3Object, check_deadline, deadline_error
from snapcap.warmup.s3.replies import bound_replies

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PART_BYTES = 8 * 1024 * 1024
_WORKERS = 8
_LISTED = 10_000
_LEFT_BEHIND_S = 3600.0  # without a write: where there are no locks, nobody is writing such a file any more
# A bucket's name, or an ARN: of an access point, one of several regions, of Object Lambda or on Outposts.
_ARN = (
    r"arn:aws[a-z-]*:(?:s3|s3-object-lambda):[a-z0-9-]*:[0-9]{12}:accesspoint[:/][A-Za-z0-9._-]{1,255}"
    r"|arn:aws[a-z-]*:s3-outposts:[a-z0-9-]+:[0-9]{12}:outpost[:/][A-Za-z0-9-]{1,63}"
    r"[:/](?:accesspoint|bucket)[:/][A-Za-z0-9._-]{1,63}"
)
_URI = re.compile(rf"s3://(?P<bucket>[A-Za-z0-9._-]{{1,255}}|{_ARN})(?:/(?P<prefix>.*))?")
_PART = re.compile(r"\..+\.[0-9a-f]{32}\.part", re.DOTALL)


@dataclass(frozen=True)
class Download:
    """An object and the file it becomes."""

    source: S3Object
    dest: Path


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
        max_pool_connections=2 * _WORKERS,
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


def list_objects(s3: "S3Client", bucket: str, prefix: str, deadline: float) -> list[S3Object]:
    """The objects directly under a prefix, without those in deeper "folders".

    Args:
        prefix: without a slash at its end; empty for the whole bucket.
        deadline: the moment of ``time.monotonic()`` to give up at; looked at between pages.

    Raises:
        S3Error: the listing failed, took too long, or has over 10,000 objects.
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


def download_object(
    s3: "S3Client", bucket: str, key: str, dest: Path, size: int, etag: str, deadline: float
) -> None:
    """Download one object; see ``download``."""
    for _ in download(s3, bucket, [Download(S3Object(key, size, etag), dest)], deadline):
        pass


def download(s3: "S3Client", bucket: str, items: Sequence[Download], deadline: float) -> Iterator[Download]:
    """Download objects in parallel ranges, and yield each one when its file is complete and in place.

    Every range asks for the ETag of the listing, so a file never mixes two versions of an object. A file appears
    under its name only when it is whole. The caller verifies the content, and syncs the file if it must outlive a
    power cut.

    Args:
        deadline: the moment of ``time.monotonic()`` to give up at, even inside a read that never returns.

    Raises:
        ObjectChangedError: an object was replaced since it was listed.
        S3Error: anything else that S3, the network or the disk refuses; files that are complete stay.
    """
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="s3")
    ending = Ending()
    jobs = [_Job(item, Ranges(s3, bucket, item.source, deadline, ending)) for item in items]
    try:
        for job in jobs:
            job.start(pool)
        for job in jobs:
            job.finish()
            yield job.item
    finally:
        ending.end()
        # Without waiting: a request to a dead host ends by its own timeout, after we have reported the failure.
        pool.shutdown(wait=False, cancel_futures=True)
        for job in jobs:
            job.discard()


def part_name(name: str) -> str:
    """A new name for a file of this name while it is on its way."""
    return f".{name}.{uuid4().hex}.part"


def remove_parts(folder: Path) -> None:
    """Remove what downloads to a folder have left behind whose processes were killed; those under way stay.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            with contextlib.suppress(OSError), locked_alone(path) as alone:
                if alone or (alone is None and time.time() - path.lstat().st_mtime > _LEFT_BEHIND_S):
                    path.unlink()


@dataclass
class _Job:
    """Downloads an object into a temporary file beside its destination.

    s3transfer is not used, as it has no deadline: its manager waits for its threads until they end, and nothing can
    close the connection that a thread reads from. Nor does it check the free space on the disk.
    """

    item: Download
    ranges: Ranges
    parts: list[Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary = self.item.dest.with_name(part_name(self.item.dest.name))
        self.where = self.ranges.where
        self._held: int | None = None  # the lock that tells a file on its way from one that was left behind

    def start(self, pool: ThreadPoolExecutor) -> None:
        size = self.item.source.size
        with translated(self.where, local=self.item.dest):
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
        with translated(self.where, local=self.item.dest):
            if self.temporary.stat().st_size != self.item.source.size:
                raise OSError(errno.EIO, "the file was changed by somebody else")
            os.replace(self.temporary, self.item.dest)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _part(self, start: int, end: int) -> None:
        """Bytes [start, end)."""
        with translated(self.where, local=self.item.dest), self.temporary.open("rb+", buffering=0) as file:
            for chunk in self.ranges.read(start, end):
                write_all(file.fileno(), chunk, start)
                start += len(chunk)
