"""Opens regular files without ever blocking on anything else, and writes files and makes folders durably."""

import contextlib
import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path


class NotAFileError(OSError):
    """Something else has the name of a file, and reading it might never end."""


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


@contextlib.contextmanager
def locked_alone(path: Path) -> Iterator[bool]:
    """Whether this process has the lock of a file, which is made if there is none, without waiting for whoever else
    has it; until the block ends, however this process does. Who has it may remove the file.

    Raises:
        OSError: the file cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who had it may have removed the file: then another one has its name, or none, and is not locked.
            alone = os.path.samestat(os.fstat(descriptor), path.lstat())
        except (BlockingIOError, FileNotFoundError):
            alone = False
        yield alone
    finally:
        os.close(descriptor)


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
