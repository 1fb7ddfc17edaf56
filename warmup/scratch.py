"""Temporary folders of processes that may be killed."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

_LOCK = "lock"  # held as long as the folder's process lives, however it ends


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """An empty folder below the temporary folder, until the block ends. What killed processes have left there under
    the same prefix is removed first, so that a server in a restart loop does not fill it."""
    _remove_abandoned(prefix)
    with TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        new, folder = Path(name) / "unlocked", Path(name) / "files"
        folder.mkdir()
        with new.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(new.with_name(_LOCK))  # with the lock held: nobody sees it without
            yield folder


def _remove_abandoned(prefix: str) -> None:
    for folder in Path(gettempdir()).glob(f"{prefix}*"):
        # Without a lock it is somebody else's, or about to be locked; another user's cannot be opened.
        with contextlib.suppress(OSError), (folder / _LOCK).open() as lock:
            if os.fstat(lock.fileno()).st_uid != os.getuid():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
