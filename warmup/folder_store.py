"""The artifact store that is a folder: always there, and the cache in front of S3."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from warmup.files import commit, describe, new_file
from warmup.manifest import Blob
from warmup.store import (
    DamagedError,
    Stored,
    StoreDeniedError,
    StoreError,
    StoreRefusedError,
    blob_name,
    checked_name,
)

_SCRATCH = "tmp"
_LEFT_BEHIND_SECONDS = 3600  # a process that was killed leaves its scratch folder


@dataclass(frozen=True)
class FolderStore:
    """A folder whose owner alone may write to it; everything that is in it may be run. See ``open``."""

    root: Path

    @classmethod
    def open(cls, root: Path) -> "FolderStore":
        """Open a folder, made with mode 0700 if there is none.

        Raises:
            StoreRefusedError: others may write to it, it is somebody else's, or it cannot be made.
        """
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = root.stat()
        except OSError as error:
            raise StoreRefusedError(
                f"cannot use {root} as artifact folder: {error.strerror}; choose another one"
            ) from error
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreRefusedError(
                f"others may write to the artifact folder {root}, and what they write would be run: "
                f"chmod go-w it, or choose a folder inside it, such as {root / 'snapcap'}"
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise StoreRefusedError(
                f"the artifact folder {root} belongs to user {status.st_uid}, who could change what would be run; "
                "choose one of your own"
            )
        return cls(root)

    @property
    def location(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        """Where an object is, or would be."""
        return self.root / checked_name(name)

    def read(self, name: str, limit: int) -> Stored | None:
        path = self.path(name)
        with self._explained(path):
            try:
                with path.open("rb") as file:
                    data = file.read(limit + 1)
            except FileNotFoundError:
                return None
        return Stored(data, _version(data))

    def write(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> str | None:
        path = self.path(name)
        with self._explained(path), new_file(path) as temporary:
            temporary.write_bytes(data)
            if not if_absent and if_version is None:
                commit(temporary, path)
                return _version(data)
            with self._lock():  # only conditional writes compete
                current = path.read_bytes() if path.exists() else None
                holds = current is None if if_absent else current is not None and _version(current) == if_version
                if not holds:
                    return None
                commit(temporary, path)
        return _version(data)

    def delete(self, name: str) -> None:
        path = self.path(name)
        with self._explained(path):
            path.unlink(missing_ok=True)

    def newest(self, folder: str, limit: int) -> list[str]:
        path = self.path(folder)
        with self._explained(path):
            entries = [*os.scandir(path)] if path.is_dir() else []
            times = {entry.name: entry.stat().st_mtime_ns for entry in entries if entry.is_file()}
        names = sorted(times, key=lambda name: times[name], reverse=True)
        return [f"{folder}/{name}" for name in names if not name.startswith(".")][:limit]

    def size(self, name: str) -> int | None:
        path = self.path(name)
        with self._explained(path):
            return path.stat().st_size if path.is_file() else None

    def upload(self, name: str, source: Path) -> None:
        path = self.path(name)
        with self._explained(path), new_file(path) as temporary:
            shutil.copyfile(source, temporary)
            commit(temporary, path)

    def download(self, sizes: Mapping[str, int], folder: Path, deadline: float) -> Iterator[tuple[str, Path]]:
        for name, size in sizes.items():
            if time.monotonic() >= deadline:
                raise StoreError(f"{self.root}: copying did not finish before its deadline")
            source, copy = self.path(name), folder / uuid4().hex
            with self._explained(source):
                if not source.is_file() or source.stat().st_size != size:
                    raise DamagedError(f"{source} is missing or not of {size} bytes")
                shutil.copyfile(source, copy)
            yield name, copy

    def is_conditional(self) -> bool:
        """Always, within the machines that share the folder's locks.

        Raises:
            StoreDeniedError: the folder is read-only.
        """
        with self._explained(self.root), self._lock():
            return True

    def verified(self, blob: Blob) -> Path | None:
        """The file of a content that is here and right; a damaged one is removed."""
        path = self.path(blob_name(blob))
        with self._explained(path):
            if not path.is_file():
                return None
            if describe(path) == blob:
                return path
            path.unlink(missing_ok=True)
        return None

    def adopt(self, source: Path, blob: Blob) -> bool:
        """Move a file of ``scratch`` to its place among the blobs; False if it is not that content."""
        path = self.path(blob_name(blob))
        with self._explained(path):
            if describe(source) != blob:
                return False
            commit(source, path)
        return True

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder on the same file system that is gone afterwards; what killed processes left goes too."""
        parent = self.root / _SCRATCH
        with self._explained(parent):
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for entry in parent.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > _LEFT_BEHIND_SECONDS:
                        shutil.rmtree(entry, ignore_errors=True)
            folder = TemporaryDirectory(dir=parent, ignore_cleanup_errors=True)
        with folder as name:
            yield Path(name)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Exclude all other processes that lock; a process that dies gives its lock back."""
        descriptor = os.open(self.root / ".lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise StoreDeniedError(f"{path}: {error.strerror}; check the folder's owner and mode") from error
        except OSError as error:
            kind = StoreDeniedError if error.strerror == "Read-only file system" else StoreError
            raise kind(f"{path}: {error.strerror or error}") from error


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
