"""Defines the protocol of an artifact store, and the names of its objects.

    manifests/<key>.json        written last: an artifact set is complete when its manifest exists
    blobs/sha256/<digest>       immutable
    blobs/packs/<digest>        only in a remote store: the small blobs of one set (artifacts/packs.py)
    leases/<key>.json           the builder that is building the set
    built/<digest>              only in a folder: the envelopes that its owner made there
    models/<key>.json           the small files and prepared weights of a model, by digest
    weights/                    only in a folder: prepared weights (warmup/weights/)
    models/files/<digest>/      only in a folder: the small files of a model under their names

A store only moves bytes. ``artifacts.fetch`` verifies their digests and signatures.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import UserError
from snapcap.warmup.artifacts.manifest import SAFE_NAME, Blob, is_digest

MANIFESTS = "manifests"
MODELS = "models"
MODEL_FILES = f"{MODELS}/files"
WEIGHTS = "weights"
CHATS = "chats"

# Reads bytes [start, end) of an object, in pieces of at most 1 MiB. Thread-safe.
Ranges = Callable[[int, int], Iterator[bytes]]


class StoreError(UserError):
    """Says in one line why a store cannot be used, and what to do.

    StoreError
    ├── StoreRefusedError    opening the store as configured would be unsafe
    ├── StoreDeniedError     credentials or permissions do not allow the operation
    └── DamagedError         an object is missing, or has the wrong size or content"""


class StoreRefusedError(StoreError):
    """Refuses a store that would be unsafe to open as configured."""


class StoreDeniedError(StoreError):
    """Says that credentials or permissions do not allow an operation on a store."""


class DamagedError(StoreError):
    """Says that an object is missing, or has the wrong size or content."""


@dataclass(frozen=True)
class Stored:
    """Holds the content of a small object, and its version for a conditional write."""

    data: bytes
    version: str


class ArtifactStore(Protocol):
    """Stores named objects. Names are relative, with ``/``. Every method raises StoreError if the store fails."""

    @property
    def location(self) -> str:
        """The address of the store, for messages."""

    @property
    def is_remote(self) -> bool:
        """True if each request costs a round trip."""

    def read(self, name: str, limit: int) -> Stored | None:
        """Returns a small object, at most ``limit`` + 1 bytes of it; None if there is none."""

    def write(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> str | None:
        """Write a small object atomically: readers see the complete old or new object.

        Args:
            if_absent: write only if no object has this name.
            if_version: write only if the object still has this version.

        Returns:
            The new version; None if the condition was not met. See ``is_conditional``.
        """

    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""

    def newest(self, folder: str, limit: int) -> list[str]:
        """Returns the names in a folder, the latest first, at most ``limit``."""

    def size(self, name: str) -> int | None:
        """Returns the size of an object in bytes; None if there is none."""

    def upload(self, name: str, source: Path) -> None:
        """Write a file to the store. Replaces any object of this name."""

    def download(self, sizes: Mapping[str, int], folder: Path, deadline: float) -> Iterator[tuple[str, Path]]:
        """Downloads objects of known size (bytes) into an existing folder, and yields each name with its complete
        file. ``deadline``: the moment of ``time.monotonic()`` to give up at. Raises DamagedError if an object is
        missing or of another size."""

    def ranges(self, name: str, size: int, deadline: float) -> AbstractContextManager[Ranges]:
        """Yields a function that reads ranges of an object of known size (bytes). All reads end with the block or
        at ``deadline``, a moment of ``time.monotonic()``. A read raises StoreError, or DamagedError if the object
        is missing or of another size."""

    def is_conditional(self) -> bool:
        """Returns whether ``write`` obeys its conditions. The first call tests this by writing. Raises
        StoreDeniedError if the store cannot be written to."""


def manifest_name(key: str) -> str:
    """Returns the name of the manifest of an artifact set."""
    return f"{MANIFESTS}/{_checked(key)}.json"


def model_name(key: str) -> str:
    """Returns the name of the manifest of a model."""
    return f"{MODELS}/{_checked(key)}.json"


def lease_name(key: str) -> str:
    """Returns the name of the lease on building a key."""
    return f"leases/{_checked(key)}.json"


def blob_name(blob: Blob) -> str:
    """Returns the name of a blob's object."""
    return f"blobs/sha256/{_checked(blob.digest)}"


def record_name(room: str, folder: Path) -> str:
    """Returns the name of the record of a checkpoint folder in a store. The folder's path decides it, so that a new
    record replaces the old one."""
    place = str(folder.resolve()).encode(errors="surrogateescape")
    return f"{room}/{hashlib.sha256(place).hexdigest()}.json"


def is_name(name: str) -> bool:
    """Returns whether a name can be an object's. Anything under another name in a store is not snapcap's."""
    return SAFE_NAME.fullmatch(name) is not None


def checked_name(name: str) -> str:
    """Returns the name if it stays within the store. Raises ValueError if no function above makes such names."""
    if not is_name(name):
        raise ValueError(f"not an object name: {name!r}")
    return name


def _checked(digest: str) -> str:
    if not is_digest(digest):
        raise ValueError(f"not a SHA-256 in hex: {digest!r}")
    return digest
