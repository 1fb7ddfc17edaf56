"""Defines the protocol of an artifact store, and where in it things are.

    manifests/<key>.json        written last: an artifact set is there when its manifest is
    blobs/sha256/<digest>       immutable
    blobs/packs/<digest>        of a remote store only: the small blobs of one set (artifacts/packs.py)
    leases/<key>.json           who is building the set
    built/<digest>              only in a folder: the envelopes that its owner made there
    models/<key>.json           the small files and prepared weights of a model, by digest
    weights/                    only in a folder: prepared weights (warmup/weights/)
    models/files/<digest>/      only in a folder: the small files of a model under their names

A store moves bytes. ``artifacts.fetch`` verifies their digests and signatures.
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

# Bytes [start, end) of an object in pieces of at most 1 MiB; for several threads.
Ranges = Callable[[int, int], Iterator[bytes]]


class StoreError(UserError):
    """A store that cannot be used; one line that says what to do.

    StoreError
    ├── StoreRefusedError    it is not opened as it is configured
    ├── StoreDeniedError     it does not let us do that
    └── DamagedError         an object is missing, or is not of the size that it should be
    """


class StoreRefusedError(StoreError):
    """A store that would be unsafe to open as configured."""


class StoreDeniedError(StoreError):
    """Credentials or permissions do not allow it."""


class DamagedError(StoreError):
    """An object that should be there, whole, is not."""


@dataclass(frozen=True)
class Stored:
    """The content of a small object, and the version to replace it by."""

    data: bytes
    version: str


class ArtifactStore(Protocol):
    """Named objects. Names are relative, with ``/``; every method raises StoreError when the store fails."""

    @property
    def location(self) -> str:
        """Where it is, for people."""
        ...

    @property
    def is_remote(self) -> bool:
        """True if each request costs a round trip."""
        ...

    def read(self, name: str, limit: int) -> Stored | None:
        """A small object, at most ``limit`` + 1 bytes of it; None if there is none."""
        ...

    def write(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> str | None:
        """Write a small object at once: readers see the old or the new one, whole.

        Args:
            if_absent: only if there is none of that name.
            if_version: only if it still is of this version.

        Returns:
            The new version; None if the condition did not hold. See ``is_conditional``.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        ...

    def newest(self, folder: str, limit: int) -> list[str]:
        """Names in a folder, the latest first, at most ``limit``."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if there is none."""
        ...

    def upload(self, name: str, source: Path) -> None:
        """Write a file, replacing any of that name."""
        ...

    def download(self, sizes: Mapping[str, int], folder: Path, deadline: float) -> Iterator[tuple[str, Path]]:
        """Bring objects of known size into an existing folder, and yield each one's name and file when it is whole.
        ``deadline``: the moment of ``time.monotonic()`` to give up at. Raises DamagedError if an object is missing
        or of another size."""
        ...

    def ranges(self, name: str, size: int, deadline: float) -> AbstractContextManager[Ranges]:
        """Reads of an object of known size, all of which end with the block or at ``deadline``, a moment of
        ``time.monotonic()``. Each raises StoreError as the methods do; DamagedError if the object is missing or of
        another size."""
        ...

    def is_conditional(self) -> bool:
        """Returns whether ``write`` obeys its conditions. The first call finds out by writing. Raises
        StoreDeniedError if the store cannot be written to."""
        ...


def manifest_name(key: str) -> str:
    """Where the manifest of a key is."""
    return f"{MANIFESTS}/{_checked(key)}.json"


def model_name(key: str) -> str:
    """Where the manifest of a model is."""
    return f"{MODELS}/{_checked(key)}.json"


def lease_name(key: str) -> str:
    """Where the lease of a key is."""
    return f"leases/{_checked(key)}.json"


def blob_name(blob: Blob) -> str:
    """Where a content is."""
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
    """The same name, known not to leave the store. Raises ValueError if it is not made by the functions
    above."""
    if not is_name(name):
        raise ValueError(f"not an object name: {name!r}")
    return name


def _checked(digest: str) -> str:
    if not is_digest(digest):
        raise ValueError(f"not a SHA-256 in hex: {digest!r}")
    return digest
