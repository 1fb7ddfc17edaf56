"""Opens and locks regular files without blocking, syncs them to the disk, and creates temporary folders.

Everybody may write to the system's temporary folder, so an entry there with one of snapcap's names may belong to
another user, and may be no folder. So opening an entry never blocks, no link is followed, and an entry is only
removed if it belongs to this user and no other user may write to it.
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
from tempfile import TemporaryDirectory, TemporaryFile, gettempdir
from uuid import uuid4

from snapcap.warmup.machine.denied import report_denied

# Errors of fsync on file systems without it, such as some network and FUSE file systems.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
# Seconds without a write after which nobody is writing a file any more: where there are no locks, and on file
# systems that do not share their locks with the other machines that mount them.
LEFT_BEHIND_S = 3600.0


class NotAFileError(OSError):
    """Says that a name belongs to a FIFO, folder, link or device, which must not be read as a file."""


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file for reading. Never blocks, even if a FIFO or a device has the name. Raises NotAFileError
    if the name is that of a folder, a FIFO, a symbolic link, a socket or a device, and OSError if the file cannot
    be opened."""
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
def opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    """Yields the descriptor of a file or folder, which is closed with the block. ``folder``: the open folder that
    ``path`` is relative to. A new file has mode 0600."""
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def take_lock(descriptor: int) -> bool | None:
    """Tries to lock a file, without waiting. The file must be open for writing, because NFS requires it.

    Returns:
        True if this process has the lock now, False if another process has it. None without locks: NFS without its
        lock service, a FUSE file system, or a system call filter. Callers then continue without the lock.
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
    """Returns whether files of a folder can be locked. Raises OSError if no file can be created there."""
    with TemporaryFile(dir=folder) as file:
        return take_lock(file.fileno()) is not None


@contextlib.contextmanager
def locked_alone(path: Path) -> Iterator[bool | None]:
    """Locks a file until the block or the process ends; yields the result of `take_lock`. Creates the file if it is
    missing. The process that has the lock may remove the file. Raises OSError if the file cannot be created."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC) as descriptor:
        alone = take_lock(descriptor)
        # The last owner of the lock may have removed the file: then another file, or none, has its name.
        if alone:
            try:
                alone = os.path.samestat(os.fstat(descriptor), path.lstat())
            except FileNotFoundError:
                alone = False
        yield alone


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
    """Create a folder and its missing parents, with at most the permissions of ``mode`` whatever the umask is.
    Raises OSError if a folder cannot be created."""
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
            if not one.is_dir():  # another process may have created it
                raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, if the file system supports it. Raises OSError
    if the sync failed, so that they may be lost."""
    with opened(path, os.O_RDONLY | os.O_CLOEXEC) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise


@contextlib.contextmanager
def new_file(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path beside ``path``. After the block, ``commit`` moves the file to ``path``; if the block
    raises, the file is removed. ``durable``: as for ``commit``."""
    make_folder(path.parent)
    temporary = path.with_name(f".{uuid4().hex}")
    try:
        yield temporary
        commit(temporary, path, durable)
    finally:
        temporary.unlink(missing_ok=True)


def commit(temporary: Path, path: Path, durable: bool = True) -> None:
    """Move a complete file to its final path atomically. ``durable``: sync the file to the disk first. Without the
    sync the file may have any content after a power cut: only for files that are verified when read, and can be
    fetched again."""
    make_folder(path.parent)
    with contextlib.suppress(OSError):  # the file system has no modes; readers check who may write
        temporary.chmod(0o600)
    if durable:
        sync(temporary)
    os.replace(temporary, path)
    if durable:
        sync(path.parent)


def write_file(path: Path, data: bytes, durable: bool = True) -> None:
    """Writes a file, whole or not at all, in place of any other of its name. ``durable``: as for ``commit``. Raises
    OSError if it cannot be written."""
    with new_file(path, durable) as temporary:
        temporary.write_bytes(data)


def remove_left(files: Iterable[Path], alone: bool | None) -> None:
    """Removes files that killed processes were writing. ``alone``: what `take_lock` returned for their lock; if
    it is None, files remain that somebody has written to within the hour. Raises OSError if a file stays."""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            if alone or time.time() - file.lstat().st_mtime > LEFT_BEHIND_S:
                file.unlink()


def other_writers(status: os.stat_result) -> str:
    """Names the other users who may write to a file or folder by its mode, such as "everybody"; empty if there are
    none.

    A group whose only member is this user does not count. Kubernetes makes a volume writable by such a group, the
    Pod's ``fsGroup``, whenever it mounts the volume."""
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
    """Returns the names of a group's members that this system knows, without this user and root."""
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


_LOCK = "lock"  # locked while the process of the folder lives; the kernel releases the lock at its end
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None, left_behind: float = 0.0) -> Iterator[Path]:
    """Create an empty folder in ``parent``, by default the temporary folder, and remove it after the block. First
    removes folders of killed processes with the same prefix that are at least ``left_behind`` seconds old, so that
    a server in a restart loop does not fill the disk."""
    parent = parent or Path(gettempdir())
    _remove_abandoned(parent, prefix, left_behind)
    with TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
        new, folder = Path(name) / "unlocked", Path(name) / "files"
        folder.mkdir()
        with opened(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC) as lock:
            # The folder gets its name once the lock is held: a folder with a free lock counts as abandoned. Without
            # locks, only its age says that a folder is abandoned.
            if take_lock(lock) or left_behind:
                new.rename(new.with_name(_LOCK))
            yield folder


def _remove_abandoned(parent: Path, prefix: str, left_behind: float) -> None:
    with contextlib.suppress(OSError), opened(parent, os.O_RDONLY | os.O_DIRECTORY) as temporary:
        with os.scandir(temporary) as entries:
            names = [each.name for each in entries if each.name.startswith(prefix)]
        for name in names:
            # A folder without a lock file belongs to another program, or is new. Another user's cannot be opened.
            with (
                contextlib.suppress(OSError),
                opened(name, _FOLDER, temporary) as folder,
                opened(_LOCK, _FILE, folder) as lock,
            ):
                old = time.time() - os.fstat(lock).st_mtime >= left_behind
                if old and _is_ours(folder, stat.S_ISDIR) and _is_ours(lock, stat.S_ISREG):
                    taken = take_lock(lock)
                    if taken or (taken is None and left_behind):  # without locks, only the age decides
                        _empty(folder)
                        os.rmdir(name, dir_fd=temporary)


def _is_ours(descriptor: int, is_kind: Callable[[int], bool]) -> bool:
    """Returns whether an open file or folder has this kind, and only this user can have written to it. A file must
    have no second hard link."""
    state = os.fstat(descriptor)
    alone = state.st_nlink == 1 or stat.S_ISDIR(state.st_mode)
    return is_kind(state.st_mode) and state.st_uid == os.geteuid() and alone and not other_writers(state)


def _empty(folder: int) -> None:
    """Remove the content of an open folder, which may have been renamed."""
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except (IsADirectoryError, PermissionError):  # Linux's and macOS's error for a folder
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
