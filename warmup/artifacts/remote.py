"""Stores artifacts under an S3 prefix, opens the store of the options, and determines its trusted signers."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.signing import KeyFileError, Trust
from snapcap.warmup.artifacts.store import (
    ArtifactStore,
    DamagedError,
    Ranges,
    Stored,
    StoreDeniedError,
    StoreError,
    StoreRefusedError,
    checked_name,
    is_name,
)
from snapcap.warmup.errors import StartError
from snapcap.warmup.options import S3Options, StoreOptions, is_remote
from snapcap.warmup.s3.client import (
    ObjectChangedError,
    S3Error,
    client,
    split_uri,
    translated,
    upload_checked,
)
from snapcap.warmup.s3.download import ObjectRanges, S3Object, download

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import PutObjectRequestTypeDef

_ABSENT = ("NoSuchKey", "404")
_DENIED = (
    "AccessDenied",
    "403",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "NoCredentials",
    "PartialCredentialsError",
    "CredentialRetrievalError",
)
_LOST = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409", *_ABSENT)
_LISTED = 1000  # keys of a listing's page; only this many manifests are searched


@dataclass(eq=False)
class S3Store:
    """Stores artifacts in a bucket under a prefix, through one client. See ``open``."""

    s3: "S3Client"
    bucket: str
    prefix: str
    is_remote = True
    _conditional: bool | None = None  # result of the canary; None until it has run
    _verified: bool | None = None  # True if the first upload had the right size; None until this is known
    _canary: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, address: str, options: S3Options) -> "S3Store":
        """Make a client for ``s3://bucket/prefix`` without sending a request. Raises StoreRefusedError if the
        address or the options are invalid."""
        try:
            bucket, prefix = split_uri(address)
            return cls(client(options), bucket, prefix)
        except S3Error as error:
            raise StoreRefusedError(str(error)) from error

    @property
    def location(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def read(self, name: str, limit: int) -> Stored | None:
        with contextlib.suppress(DamagedError), self._at(name) as key:
            reply = self.s3.get_object(Bucket=self.bucket, Key=key)
            with contextlib.closing(reply["Body"]) as body:
                return Stored(body.read(limit + 1), _unquoted(reply["ETag"]))
        return None

    def write(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> str | None:
        request: PutObjectRequestTypeDef = {"Bucket": self.bucket, "Key": self._key(name), "Body": data}
        if if_absent:
            request["IfNoneMatch"] = "*"
        elif if_version is not None:
            request["IfMatch"] = if_version  # unquoted: Ceph compares the text as it is, other stores accept both
        try:
            with self._at(name):
                return _unquoted(upload_checked(self.s3, lambda: self.s3.put_object(**request))["ETag"])
        except StoreError as error:
            if (if_absent or if_version is not None) and _code(error) in _LOST:
                return None
            raise

    def delete(self, name: str) -> None:
        with self._at(name) as key:
            self.s3.delete_object(Bucket=self.bucket, Key=key)

    def newest(self, folder: str, limit: int) -> list[str]:
        with self._at(folder) as key:
            start = f"{key}/"
            reply = self.s3.list_objects_v2(Bucket=self.bucket, Prefix=start, Delimiter="/", MaxKeys=_LISTED)
        entries = sorted(reply.get("Contents", ()), key=lambda entry: entry["LastModified"], reverse=True)
        names = [entry["Key"].removeprefix(start) for entry in entries]
        return [f"{folder}/{name}" for name in names if is_name(name)][:limit]

    def size(self, name: str) -> int | None:
        with contextlib.suppress(DamagedError), self._at(name) as key:
            return self.s3.head_object(Bucket=self.bucket, Key=key)["ContentLength"]
        return None

    def upload(self, name: str, source: Path) -> None:
        from s3transfer.manager import TransferManager  # noqa: PLC0415  no start needs it

        def send() -> None:
            # A large file is uploaded in parts, because S3 accepts at most 5 GB in one request.
            with source.open("rb") as file, TransferManager(self.s3) as manager:
                manager.upload(file, self.bucket, self._key(name)).result()

        def is_whole() -> bool:
            if self._verified is None:
                with contextlib.suppress(StoreError):  # the role may only write
                    self._verified = self.size(name) in (source.stat().st_size, None)
            return self._verified is not False

        with self._at(name):
            upload_checked(self.s3, send, is_whole)

    def download(self, sizes: Mapping[str, int], folder: Path, deadline: float) -> Iterator[tuple[str, Path]]:
        # ETags would cost a request for each object; the content's digest is checked instead.
        names = {folder / uuid4().hex: name for name in sizes}
        objects = {path: S3Object(self._key(name), sizes[name], etag="") for path, name in names.items()}
        with self._at():
            for path in download(self.s3, self.bucket, objects, deadline):
                yield names[path], path

    @contextlib.contextmanager
    def ranges(self, name: str, size: int, deadline: float) -> Iterator[Ranges]:
        # An empty ETag accepts any version; the chunks' digests are checked instead.
        ranges = ObjectRanges(self.s3, self.bucket, S3Object(self._key(name), size, etag=""), deadline)

        def read(start: int, end: int) -> Iterator[bytes]:
            with self._at(name):
                yield from ranges.read(start, end)

        try:
            yield read
        finally:
            ranges.ending.end()

    def is_conditional(self) -> bool:
        """Tests conditional writes with a canary, an object with a unique name that is written four times."""
        with self._canary:
            if self._conditional is None:
                self._conditional = self._fly_canary()
        return self._conditional

    def _fly_canary(self) -> bool:
        name = f"leases/canary-{uuid4().hex}"
        try:
            version = self.write(name, b"1", if_absent=True)
            if version is None:
                return False
            return (
                self.write(name, b"2", if_absent=True) is None
                and self.write(name, b"3", if_version="0" * 32) is None
                and self.write(name, b"4", if_version=version) is not None
            )
        except StoreError as error:
            if _code(error) in ("NotImplemented", "501"):
                return False
            raise
        finally:
            with contextlib.suppress(StoreError):  # without s3:DeleteObject, the one byte of the canary stays
                self.delete(name)

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{checked_name(name)}" if self.prefix else checked_name(name)

    @contextlib.contextmanager
    def _at(self, name: str | None = None) -> Iterator[str]:
        """Yields the key of an object, or the prefix without a name. Maps an error of S3 or of the network inside
        the block to a StoreError about this address."""
        key = self.prefix if name is None else self._key(name)
        try:
            with translated(f"s3://{self.bucket}/{key}".rstrip("/")):
                yield key
        except S3Error as error:
            if isinstance(error, ObjectChangedError) or error.code in _ABSENT:
                raise DamagedError(f"{error.where} is missing, or has the wrong size") from error
            raise (StoreDeniedError if error.code in _DENIED else StoreError)(str(error)) from error


def _code(error: StoreError) -> str:
    """Returns S3's error code that caused a store's error."""
    return error.__cause__.code if isinstance(error.__cause__, S3Error) else ""


def _unquoted(etag: str) -> str:
    return etag.strip('"')


def check_store(address: str, trust: Trust) -> None:
    """Check that a store may be opened, without opening it or importing boto3. Raises StoreRefusedError for an
    invalid address, or an S3 store without trusted keys. A folder's owner is always trusted."""
    if not is_remote(address):
        return
    if not address.startswith("s3://"):
        raise StoreRefusedError(f"{address!r} is no artifact store; write s3://bucket/prefix or a folder")
    if trust.nobody:
        raise StoreRefusedError(
            f"{address} is refused: whoever can write there could run code here. Name the key it is signed with by "
            "--trusted-key FILE, or accept anybody's artifacts with --allow-unsigned"
        )


def open_store(address: str, s3: S3Options, trust: Trust) -> ArtifactStore:
    """Open ``s3://bucket/prefix`` or a folder, without a request to S3. Raises StoreRefusedError as ``check_store``
    does, or if other users may write to the folder, or if the S3 options are invalid."""
    check_store(address, trust)
    if is_remote(address):
        return S3Store.open(address, s3)
    return FolderStore.open(Path(address))


def trust_of(options: StoreOptions) -> Trust:
    """Returns the trust in the store's artifacts: the keys whose signatures are accepted. Raises StartError if a
    key file cannot be read, or an S3 store is given without any trust."""
    try:
        trust = Trust.of(options)
        check_store(options.address, trust)
    except (KeyFileError, StoreRefusedError) as error:
        raise StartError(str(error)) from None
    return trust
