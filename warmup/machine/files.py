"""Opens and locks regular files without ever waiting, makes them durable, and makes temporary folders.

The folder that holds temporary folders may be writable by everybody: an entry there with a name of ours need not
be ours, and need not be a folder. So nothing is opened there that could block, no link is followed, and an entry is
only removed if it belongs to this user and nobody else may write to it.
"""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from uuid import uuid4

from snapcap.warmup.machine.denied import report_denied

# Errors of fsync on a file system that has none, such as some network and FUSE file systems.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
# Seconds without a write after which nobody is writing a file any more: where there are no locks, and on file
# systems that do not share their locks with the other machines that mount them.
LEFT_BEHIND_S = 3600.0


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
    """Returns whether files of a folder can be locked. Raises OSError if no file can be made there."""
    from tempfile import TemporaryFile  # noqa: PLC0415 - only builds need it

    with TemporaryFile(dir=folder) as file:
        return take_lock(file.fileno()) is not None


@contextlib.contextmanager
def locked_alone(path: Path) -> Iterator[bool | None]:
    """Yields whether this process has the lock of a file, as `take_lock` says it, until the block ends or the
    process does. The file is made if there is none. The process that has the lock may remove the file. Raises
    OSError if the file cannot be made."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        alone = take_lock(descriptor)
        # The process that had the lock may have removed the file: then its name is another file's, or nobody's.
        if alone:
            try:
                alone = os.path.samestat(os.fstat(descriptor), path.lstat())
            except FileNotFoundError:
                alone = False
        yield alone
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at an offset of a file. A system call may write only a part, for example when the disk
    fills up; the next call then fails. Raises OSError if it cannot be written."""
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
    """Make a folder with all that are missing above it; no umask gives others more than ``mode`` does. Raises
    OSError if one cannot be made."""
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
    """Wait until a file, or the names in a folder, are on the disk, where the file system can tell. Raises OSError
    if they are not, and may be lost."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


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
    with contextlib.suppress(OSError):  # a file system without modes; whoever reads looks who may write
        temporary.chmod(0o600)
    if durable:
        sync(temporary)
    os.replace(temporary, path)
    if durable:
        sync(path.parent)


def write_file(path: Path, data: bytes, durable: bool = True) -> None:
    """Writes a file, whole or not at all, in place of any other of its name. ``durable``: as for ``commit``. Raises
    OSError if it cannot be written."""
    with new_file(path) as temporary:
        temporary.write_bytes(data)
        commit(temporary, path, durable)


def remove_left(files: Iterable[Path], alone: bool | None) -> None:
    """Removes files that killed processes were writing. ``alone``: what `take_lock` returned for their lock; if
    it is None, files remain that somebody has written to within the hour. Raises OSError if a file stays."""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            if alone or time.time() - file.lstat().st_mtime > LEFT_BEHIND_S:
                file.unlink()


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


_LOCK = "lock"  # held as long as the folder's process lives, however it ends
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None, left_behind: float = 0.0) -> Iterator[Path]:
    """Make an empty folder below ``parent``, or else the temporary folder, until the block ends. Folders that
    killed processes left there under the same prefix, at least ``left_behind`` seconds ago, are removed first, so
    that a server in a restart loop does not fill the disk."""
    parent = parent or Path(gettempdir())
    _remove_abandoned(parent, prefix, left_behind)
    with TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
        new, folder = Path(name) / "unlocked", Path(name) / "files"
        folder.mkdir()
        with _opened(str(new), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC) as lock:
            # Named with the lock held: another process takes a lock that nobody holds for an abandoned one. Where
            # there are no locks, only a folder whose age tells has the name.
            if take_lock(lock) or left_behind:
                new.rename(new.with_name(_LOCK))
            yield folder


def _remove_abandoned(parent: Path, prefix: str, left_behind: float) -> None:
    with contextlib.suppress(OSError), _opened(str(parent), os.O_RDONLY | os.O_DIRECTORY) as temporary:
        with os.scandir(temporary) as entries:
            names = [each.name for each in entries if each.name.startswith(prefix)]
        for name in names:
            # A folder without a lock is somebody else's, or about to have one; another user's cannot be opened.
            with (
                contextlib.suppress(OSError),
                _opened(name, _FOLDER, temporary) as folder,
                _opened(_LOCK, _FILE, folder) as lock,
            ):
                old = time.time() - os.fstat(lock).st_mtime >= left_behind
                if old and _is_ours(folder, stat.S_ISDIR) and _is_ours(lock, stat.S_ISREG):
                    taken = take_lock(lock)
                    if taken or (taken is None and left_behind):  # without locks its age is all that tells
                        _empty(folder)
                        os.rmdir(name, dir_fd=temporary)


def _is_ours(descriptor: int, is_kind: Callable[[int], bool]) -> bool:
    """Returns whether an open file or folder is of a kind, and only this user can have written to it. A file must
    have a single name."""
    state = os.fstat(descriptor)
    alone = state.st_nlink == 1 or stat.S_ISDIR(state.st_mode)
    return is_kind(state.st_mode) and state.st_uid == os.geteuid() and alone and not other_writers(state)


def _empty(folder: int) -> None:
    """Remove what is in an open folder, which may have another name by now."""
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except (IsADirectoryError, PermissionError):  # Linux's and macOS's error for a folder
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


@contextlib.contextmanager
def _opened(path: str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
