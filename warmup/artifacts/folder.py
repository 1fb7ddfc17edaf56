"""Stores artifacts in a folder that only its owner may write to. The folder is also the cache in front of S3."""

import contextlib
import errno
import hashlib
import io
import itertools
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from uuid import uuid4

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.manifest import Blob, describe
from snapcap.warmup.artifacts.store import (
    CHATS,
    MANIFESTS,
    MODEL_FILES,
    MODELS,
    WEIGHTS,
    DamagedError,
    Ranges,
    Stored,
    StoreDeniedError,
    StoreError,
    StoreRefusedError,
    blob_name,
    checked_name,
    is_name,
)
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.files import (
    LEFT_BEHIND_S,
    NotAFileError,
    commit,
    locked_alone,
    make_folder,
    new_file,
    open_regular,
    other_writers,
    scratch_folder,
    write_file,
)

WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_owner(path: Path, status: os.stat_result, more: str = "") -> None:
    """Refuse a file or folder that another user than this one and root may write to. Raises StoreRefusedError,
    whose text says what to do."""
    others = other_writers(status)
    if others:
        raise StoreRefusedError(
            f"others may write to {path} in the artifact folder ({others}), and what they write would be run: "
            f"chmod go-w it{more}"
            + (", or under Kubernetes set fsGroupChangePolicy: OnRootMismatch" if "group" in others else "")
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise StoreRefusedError(
            f"{path} in the artifact folder belongs to user {status.st_uid}, who could change what would be run; "
            "choose a folder of your own"
        )


def close_to_others(path: Path, status: os.stat_result) -> None:
    """Remove the write permissions of the group and of others from a file or folder, if this user owns it.

    Kubernetes gives a Pod's ``fsGroup`` such a permission when it mounts a volume. Afterwards, a process of another
    Pod with the same group can no longer replace verified files."""
    if status.st_mode & WRITTEN_BY_OTHERS and status.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # the file system has no modes
            path.chmod(stat.S_IMODE(status.st_mode) & ~WRITTEN_BY_OTHERS)


_BUILT, _SCRATCH = _OWN = "built", "tmp"
# All folders of a store; only its owner may write to them.
_FOLDERS = (MANIFESTS, "blobs", "blobs/sha256", "leases", "builds", MODELS, MODEL_FILES, WEIGHTS, CHATS, *_OWN)
_LISTED = 10_000  # entries of a folder that are searched; any further ones are ignored
_SMALL = 8 * 1024 * 1024  # bytes of the largest object of a conditional write
_LOCK_SECONDS = 10.0
_SHORT = 4096
_PIECE = 1024 * 1024


@dataclass(frozen=True)
class FolderStore:
    """Stores artifacts in a folder that only its owner may write to, as its code may be run. See ``open``."""

    root: Path
    is_remote = False

    @classmethod
    def open(cls, root: Path) -> "FolderStore":
        """Open a folder, created with mode 0700 if missing. Raises StoreRefusedError if other users may write to it
        or to one of its subfolders, if another user owns it, or if it cannot be created."""
        try:
            make_folder(root)
            known = {root: root.stat()}
            check_owner(root, known[root], f", or choose a folder inside it, such as {root / 'snapcap'}")
            for path in (root / name for name in _FOLDERS):
                with contextlib.suppress(FileNotFoundError):
                    known[path] = path.stat()
                    check_owner(path, known[path])
            for path, status in known.items():
                close_to_others(path, status)
        except OSError as error:
            raise StoreRefusedError(f"cannot use {root} as artifact folder: {os_error_text(error)}") from error
        return cls(root)

    @property
    def location(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        """Returns the path of an object, which need not exist."""
        return self.root / checked_name(name)

    def read(self, name: str, limit: int) -> Stored | None:
        """Reads a small object as ``ArtifactStore.read`` does. Raises DamagedError if a folder, a FIFO or a link
        has the name, and StoreRefusedError if others may write to the file."""
        with self.opened(name) as file:
            data = None if file is None else file.read(limit + 1)
        return None if data is None else Stored(data, _version(data))

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[io.BufferedReader | None]:
        """Opens a file that no other user can have written, for reading; yields None if there is none. Raises
        DamagedError and StoreRefusedError as ``read`` does."""
        with self._at(name) as path, contextlib.ExitStack() as scope:
            file = None
            with contextlib.suppress(FileNotFoundError):
                try:
                    file = scope.enter_context(open_regular(path))
                except NotAFileError as error:
                    raise DamagedError(f"{path}: {error.strerror}") from error
                check_owner(path, os.fstat(file.fileno()))
            yield file

    def write(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> str | None:
        with self._at(name) as path:
            if not if_absent and if_version is None:
                write_file(path, data)
                return _version(data)
            with self._lock():  # only conditional writes compete
                current = self.read(name, _SMALL)
                holds = current is None if if_absent else current is not None and current.version == if_version
                if not holds:
                    return None
                write_file(path, data)
        return _version(data)

    def keep(self, name: str, data: bytes) -> None:
        """Write an object without a sync: it can be fetched again, and is verified when it is read."""
        with self._at(name) as path:
            write_file(path, data, durable=False)

    def delete(self, name: str) -> None:
        with self._at(name) as path:
            path.unlink(missing_ok=True)

    def newest(self, folder: str, limit: int) -> list[str]:
        times: dict[str, int] = {}
        with self._at(folder) as path, contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in itertools.islice(entries, _LISTED):
                # A file of any other name is not snapcap's. A file that is gone by now was just replaced.
                if is_name(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        times[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
        names = sorted(times, key=lambda name: times[name], reverse=True)
        return [f"{folder}/{name}" for name in names[:limit]]

    def size(self, name: str) -> int | None:
        with self._at(name) as path:
            try:
                status = path.lstat()
            except FileNotFoundError:
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def upload(self, name: str, source: Path) -> None:
        with self._at(name) as path, new_file(path) as temporary:
            _copy_file(source, temporary)

    def download(self, sizes: Mapping[str, int], folder: Path, deadline: float) -> Iterator[tuple[str, Path]]:
        for name, size in sizes.items():
            if time.monotonic() >= deadline:
                raise StoreError(f"{self.root}: copying did not finish before its deadline")
            copy = folder / uuid4().hex
            with self._at(name) as source:
                if self.size(name) != size:
                    raise DamagedError(f"{source} is missing or not of {size} bytes")
                _copy_file(source, copy)
            yield name, copy

    @contextlib.contextmanager
    def ranges(self, name: str, size: int, deadline: float) -> Iterator[Ranges]:
        with self.opened(name) as file:
            if file is None or os.fstat(file.fileno()).st_size != size:
                raise DamagedError(f"{self.path(name)} is missing or not of {size} bytes")
            descriptor = os.dup(file.fileno())

        def read(start: int, end: int) -> Iterator[bytes]:
            with self._at(name):
                yield from _pieces(descriptor, start, end, deadline)

        try:
            yield read
        finally:
            os.close(descriptor)

    def is_conditional(self) -> bool:
        """Returns whether the folder has locks. The locks hold between all machines that share the file system.
        Raises StoreDeniedError if the folder is read-only."""
        with self._at(), self._lock() as locks:
            return locks

    def vouch(self, envelope: bytes) -> None:
        """Note that the folder's owner made an envelope and built the files that it describes.

        The note holds its own inode number. So a note that was copied into the folder, for example with a bucket,
        does not count."""
        with self._at(f"{_BUILT}/{_version(envelope)}") as path, new_file(path) as temporary:
            temporary.touch()
            temporary.write_text(str(temporary.stat().st_ino))

    def is_vouched(self, envelope: bytes) -> bool:
        """Returns whether ``vouch`` was called with this envelope, in this folder.

        A note that a group may write to does not count; such a folder needs signatures."""
        with self._at(f"{_BUILT}/{_version(envelope)}") as path:
            try:
                with open_regular(path) as file:
                    status = os.fstat(file.fileno())
                    check_owner(path, status)
                    closed = not status.st_mode & stat.S_IWGRP
                    return closed and file.read(_SHORT) == str(status.st_ino).encode()
            except (FileNotFoundError, NotAFileError):
                return False

    def verified(self, blob: Blob) -> Path | None:
        """Returns the verified file of a blob; None if it is missing. Removes a damaged file."""
        with self._at(blob_name(blob)) as path:
            try:
                if path.lstat().st_size == blob.size and describe(path) == blob:
                    return path
            except FileNotFoundError:
                return None
            except NotAFileError:
                pass
            path.unlink(missing_ok=True)
        return None

    def link(self, source: Path, blob: Blob) -> None:
        """Give a finished file of this file system a second name among the blobs. Every reader verifies the
        blob."""
        with self._at(blob_name(blob)) as path, new_file(path) as temporary:
            try:
                os.link(source, temporary, follow_symlinks=False)
            except OSError:  # the file system has no links
                _copy_file(source, temporary)

    def adopt(self, source: Path, blob: Blob) -> bool:
        """Move a file of ``scratch`` to its place among the blobs. Returns False if it has other content."""
        with self._at(blob_name(blob)) as path:
            if describe(source) != blob:
                return False
            commit(source, path, durable=False)  # each user verifies the file, and fetches a damaged one again
        return True

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yields a temporary folder of the same file system. Removes it later, with those of killed processes."""
        with self._at(_SCRATCH) as parent, contextlib.ExitStack() as entering:
            make_folder(parent)
            folder = entering.enter_context(scratch_folder("snapcap-fetch-", parent, LEFT_BEHIND_S))
            scope = entering.pop_all()
        with scope:
            yield folder

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hold the folder's lock against other processes; the kernel releases the lock of a process that dies.
        Yields False if the file system has no locks: then no process is excluded. Raises StoreError if another
        process holds the lock for 10 s."""
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            with locked_alone(self.root / ".lock") as taken:
                if taken is not False:
                    yield bool(taken)
                    return
            if time.monotonic() >= until:
                raise StoreError(f"{self.root} is locked by another process for over {_LOCK_SECONDS:g} s")
            time.sleep(0.02)

    @contextlib.contextmanager
    def _at(self, name: str | None = None) -> Iterator[Path]:
        """Yields the path of an object, or of the folder without a name. Maps an error of the file system inside
        the block to a StoreError about this path."""
        path = self.root if name is None else self.path(name)
        try:
            yield path
        except OSError as error:
            denied = isinstance(error, PermissionError) or error.errno == errno.EROFS
            raise (StoreDeniedError if denied else StoreError)(f"{path}: {os_error_text(error)}") from error


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _copy_file(source: Path, target: Path) -> None:
    """Raises OSError if the source cannot be copied, or is not a regular file."""
    with open_regular(source) as opened, target.open("wb") as file:
        shutil.copyfileobj(opened, file, _PIECE)


def _pieces(descriptor: int, start: int, end: int, deadline: float) -> Iterator[bytes]:
    """Yields bytes [start, end) of an open file, at most 1 MiB at a time. Raises OSError if the file cannot be read
    or is shorter, and TimeoutError at ``deadline``, a moment of ``time.monotonic()``."""
    while start < end:
        if time.monotonic() >= deadline:
            raise TimeoutError("copying did not finish before its deadline")
        piece = os.pread(descriptor, min(end - start, _PIECE), start)
        if not piece:
            raise OSError(errno.EIO, "the file has become shorter")
        start += len(piece)
        yield piece
