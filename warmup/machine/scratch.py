"""Makes temporary folders for processes that may be killed, and removes those that killed ones left behind.

The folder that holds them may be writable by everybody: what lies there under our names need not be ours, and need
not be a folder. So nothing is opened there that could block, no link is followed, and only what belongs to this
user, and what nobody else may write to, is removed.
"""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from snapcap.warmup.machine.files import other_writers, take_lock

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
