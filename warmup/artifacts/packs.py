"""Packs the small files of a set into one object, because requests to S3 take longer than the bytes of small files.

    blobs/packs/<digest of the blobs' digests>     the contents, one after the other, in the order of their digests

A pack is a copy of the blobs. If a pack cannot be fetched in a quarter of the time until the deadline, each blob is
downloaded by itself. Blobs cut from a pack are verified here; the caller verifies blobs that are downloaded alone.
"""

import hashlib
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.manifest import Blob
from snapcap.warmup.artifacts.store import ArtifactStore, StoreError, blob_name
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.files import open_regular, scratch_folder
from snapcap.warmup.s3.download import PART_BYTES

_MOST_BYTES = 256 * 1024 * 1024
_SHARE = 4  # a pack may take this part of the time until the deadline: 1/4; the rest is for the single files
_logger = logging.getLogger("snapcap.store")


@dataclass(frozen=True)
class Pack:
    """Lists distinct blobs of at most 8 MiB, each of which takes one request, in the order of digests."""

    blobs: tuple[Blob, ...]

    @classmethod
    def of(cls, blobs: Iterable[Blob]) -> "Pack | None":
        """Returns the pack of a set's blobs; None if it would save no request, or have over 256 MiB."""
        small = {blob for blob in blobs if blob.size <= PART_BYTES}
        pack = cls(tuple(sorted(small, key=lambda blob: (blob.digest, blob.size))))
        return pack if len(small) > 1 and pack.size <= _MOST_BYTES else None

    @property
    def name(self) -> str:
        digests = "".join(f"{blob.digest} {blob.size}\n" for blob in self.blobs)
        return f"blobs/packs/{hashlib.sha256(digests.encode()).hexdigest()}"

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(blob.size for blob in self.blobs)

    def write(self, files: Mapping[Blob, Path], target: Path) -> None:
        """Write the blobs' files into a pack. Raises OSError."""
        with target.open("xb") as pack:
            for blob in self.blobs:
                with open_regular(files[blob]) as file:
                    pack.write(file.read(blob.size))

    def cut(self, source: Path, folder: Path) -> Iterator[tuple[Blob, Path]]:
        """Cuts a pack into files of an existing folder. Yields the blobs whose content is right. Raises OSError."""
        with open_regular(source) as pack:
            for blob in self.blobs:
                content = pack.read(blob.size)
                if hashlib.sha256(content).hexdigest() == blob.digest:
                    path = folder / f"{blob.digest}.blob"
                    path.write_bytes(content)
                    yield blob, path


def upload_blobs(store: ArtifactStore, files: Mapping[Blob, Path], replace: bool = False) -> None:
    """Write the files of a set to a store, and their pack to a remote store. ``replace``: write also blobs that the
    store has with the right size. Raises StoreError or OSError if the store or a file cannot be used."""

    def is_wanted(name: str, size: int) -> bool:
        return replace or store.size(name) != size

    for blob, path in files.items():
        if is_wanted(blob_name(blob), blob.size):
            store.upload(blob_name(blob), path)
    pack = Pack.of(files) if store.is_remote else None
    if pack is not None and is_wanted(pack.name, pack.size):
        with scratch_folder("snapcap-pack-") as folder:
            try:
                pack.write(files, folder / "pack")
            except OSError as error:  # a full disk names no file
                raise StoreError(f"{error.filename or folder}: {os_error_text(error)}") from error
            store.upload(pack.name, folder / "pack")


def download_blobs(
    store: ArtifactStore, blobs: Iterable[Blob], missing: Collection[Blob], folder: Path, deadline: float
) -> Iterator[tuple[Blob, Path]]:
    """Downloads blobs into an existing folder, and yields each blob with its complete file. Raises DamagedError if
    a blob is missing or of another size, and StoreError if the store cannot be read.

    Args:
        blobs: all blobs of the set, which name its pack. missing: the blobs to download.
        deadline: the moment of ``time.monotonic()`` to give up at.
    """
    left = {blob_name(blob): blob for blob in missing}
    pack = Pack.of(blobs) if store.is_remote else None
    if pack is not None and left.keys() >= {blob_name(blob) for blob in pack.blobs}:
        for blob, path in _unpacked(store, pack, folder, deadline):
            del left[blob_name(blob)]
            yield blob, path
    for name, path in store.download({name: blob.size for name, blob in left.items()}, folder, deadline):
        yield left[name], path


def _unpacked(store: ArtifactStore, pack: Pack, folder: Path, deadline: float) -> Iterator[tuple[Blob, Path]]:
    """Yields the files of a pack. Ignores errors of the store and the disk: the caller then downloads each file by
    itself, and reports errors of those downloads."""
    now = time.monotonic()
    path = None
    try:
        ((_, path),) = store.download({pack.name: pack.size}, folder, now + (deadline - now) / _SHARE)
        yield from pack.cut(path, folder)
    except Exception as error:  # such as a missing pack, one in an archive, a key of KMS, or no room for it twice
        _logger.info("files are fetched one by one", extra={"fields": {"reason": str(error)}})
    finally:
        if path is not None:  # its bytes have been copied into the files
            path.unlink(missing_ok=True)
