"""Opens and locks regular files without ever waiting, makes them durable, and tells who may write to them."""

import contextlib
import errno
import fcntl
import io
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from snapcap.warmup.machine.denied import report_denied

# Errors of fsync on a file system that has none, such as some network and FUSE file systems.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


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


def take_lock(descriptor: int) -> bool | None:
    """Takes the lock of a file that is open for writing, which NFS asks for, and does not wait.

    Returns:
        False if another process has the lock. None if there are no locks: NFS without its lock service, a file
        system of FUSE, or a filter of system calls. A lock only saves work, so whoever asks goes on without.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        effect = "processes that share the folder may do the same work twice"
        report_denied("flock", effect, os.strerror(error.errno or 0))
        return None
    return True


def has_locks(folder: Path) -> bool:
    """Returns whether files of a folder can be locked.

    Raises:
        OSError: no file can be made there.
    """
    from tempfile import TemporaryFile  # noqa: PLC0415 - only builds need it

    with TemporaryFile(dir=folder) as file:
        return take_lock(file.fileno()) is not None


@contextlib.contextmanager
def locked_alone(path: Path) -> Iterator[bool | None]:
    """Yields whether this process has the lock of a file, as `take_lock` says it, until the block ends or the
    process does. The file is made if there is none. The process that has the lock may remove the file.

    Raises:
        OSError: the file cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        alone = take_lock(descriptor)
        # The process that had the lock may have removed the file: then its name is another file's, or nobody's.
        if alone and not _has_name(descriptor, path):
            alone = False
        yield alone
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at an offset of a file. A system call may write only a part, for example when the disk
    fills up; the next call then fails.

    Raises:
        OSError: it cannot be written.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest, offset = rest[written:], offset + written


def free_bytes(place: Path | int) -> int:
    """Returns the free bytes on the disk of a folder or of an open file. A file system that does not tell, such as
    some of FUSE, counts as endless."""
    try:
        disk = os.statvfs(place)
    except OSError:
        return sys.maxsize
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else sys.maxsize


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
    """Wait until a file, or the names in a folder, are on the disk, where the file system can tell.

    Raises:
        OSError: they are not, and may be lost.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def other_writers(status: os.stat_result) -> str:
    """Names the other users that the mode of a file or folder lets write to it, such as "everybody"; empty if there
    are none.

    A group that has no member but this user does not count. Kubernetes makes a volume writable by such a group, the
    Pod's ``fsGroup``, whenever it mounts the volume.
    """
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if not status.st_mode & stat.S_IWGRP:
        return ""
    if status.st_gid not in (os.getegid(), *os.getgroups()):
        return f"group {status.st_gid}"
    others = _others_in(status.st_gid)
    return f"group {status.st_gid} ({', '.join(sorted(others)[:3])})" if others else ""


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _not_a_file(path: Path) -> NotAFileError:
    return NotAFileError(errno.EINVAL, "it is not a regular file; remove it", str(path))


def _others_in(group: int) -> set[str]:
    """The names of a group's members that this system knows, without this user and root."""
    import grp  # noqa: PLC0415 - few starts ask the system's databases
    import pwd  # noqa: PLC0415

    try:
        named = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        named = set()
    ours = (os.geteuid(), 0)
    users = pwd.getpwall()
    primary = {user.pw_name for user in users if user.pw_gid == group and user.pw_uid not in ours}
    return primary | (named - {user.pw_name for user in users if user.pw_uid in ours})
