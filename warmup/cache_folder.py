"""Chooses the folder for files that later starts use again, also for a user without a home folder."""

import contextlib
import functools
import os
import stat
from pathlib import Path

_NAME = "snapcap"


def user_cache() -> Path:
    """Returns snapcap's folder in the user's cache folder, which the XDG base directory specification defines.

    Without a writable home folder, as in many containers, returns a new folder in the temporary folder, which only
    this user can open."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / _NAME
    except RuntimeError:
        return _temporary()
    return folder if is_usable(folder) else _temporary()


def is_temporary(folder: Path) -> bool:
    """Returns whether a cache folder of snapcap lies in the temporary folder."""
    import tempfile  # noqa: PLC0415 - a start has imported it by then

    with contextlib.suppress(OSError):
        return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith(f"{_NAME}-")
    return False


def is_usable(folder: Path) -> bool:
    """Returns whether a folder exists or can be made. A read-only folder is usable if something is in it."""
    if os.path.isdir(folder):
        with contextlib.suppress(OSError):
            return os.access(folder, os.W_OK | os.X_OK) or bool(os.listdir(folder))
        return False
    if not folder.is_absolute():  # a path such as "~", without a home folder
        return False
    above = next((each for each in folder.parents if os.path.lexists(each)), Path("/"))
    return os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK)


@functools.cache
def _temporary() -> Path:
    """Returns a private folder of this user in the temporary folder. Where another user has taken the usual name,
    the folder gets a random name, and later starts do not find it again."""
    import tempfile  # noqa: PLC0415 - few starts need it

    try:
        folder = Path(tempfile.gettempdir(), f"{_NAME}-{os.geteuid()}")
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            state = folder.lstat()
            mine = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
            if not mine or state.st_mode & 0o077:
                folder = Path(tempfile.mkdtemp(prefix=f"{_NAME}-"))
    except OSError:
        return Path("/nonexistent", _NAME)  # every use of this folder reports an error
    return folder
