"""Files that are written whole or not at all, and read as what they were verified to be, without ever waiting."""

import contextlib
import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from snapcap.warmup.manifest import Blob


class NotAFileError(OSError):
    """Something else has the name of a file, and reading it might never end."""


class ChangedError(OSError):
    """A file does not hold what it was verified to hold."""


@dataclass(frozen=True)
class VerifiedFile:
    """A file and the content that it was verified to have, which is the only one it is ever used with."""

    path: Path
    blob: Blob

    @classmethod
    def of(cls, path: Path) -> "VerifiedFile":
        """A file as it is now.

        Raises:
            OSError: it cannot be read.
        """
        return cls(path, describe(path))

    def read(self) -> bytes:
        """The content, verified again as the bytes that are returned: the file may have changed since.

        Raises:
            ChangedError: it has.
            OSError: it cannot be read.
        """
        with open_regular(self.path) as file:
            data = file.read(self.blob.size + 1)
        if Blob(hashlib.sha256(data).hexdigest(), len(data)) != self.blob:
            raise ChangedError(f"{self.path.name} has changed since it was verified")
        return data


def open_regular(path: Path) -> io.BufferedReader:
    """A file opened for reading; opening it never waits, whatever has its name.

    Raises:
        NotAFileError: it is a folder, a FIFO, a symbolic link, a socket or a device.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise _not_a_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_file(path)
    return os.fdopen(descriptor, "rb")


def describe(path: Path) -> Blob:
    """Digest and size of a file.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return Blob(digest.hexdigest(), file.tell())


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at an offset of a file. One call of the system may write a part of it, as where a disk
    fills up: the next one then says so.

    Raises:
        OSError: it cannot be written.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest, offset = rest[written:], offset + written


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Make a folder with all that are missing above it; no umask gives others more than ``mode`` does.

    Raises:
        OSError: one cannot be made.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        if folder.parent == folder:
            break
        folder = folder.parent
    for one in reversed(missing):
        try:
            one.mkdir(mode=mode)
        except FileExistsError:
            if not one.is_dir():  # somebody else may have been faster
                raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a file that is to become it by ``commit``; without a commit it is removed."""
    make_folder(path.parent)
    temporary = path.with_name(f".{uuid4().hex}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def commit(temporary: Path, path: Path, durable: bool = True) -> None:
    """Put a complete file in place, whole or not at all.

    Args:
        durable: also after a power cut; otherwise it may then hold anything, which only those can bear who verify
            what they read, and can have it again.
    """
    make_folder(path.parent)
    temporary.chmod(0o600)
    if durable:
        sync(temporary)
    os.replace(temporary, path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Raises:
        OSError: they are not, and may be lost.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_a_file(path: Path) -> NotAFileError:
    return NotAFileError(errno.EINVAL, "it is not a regular file; remove it", str(path))
