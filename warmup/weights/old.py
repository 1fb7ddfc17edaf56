"""Removes prepared weights that another checkpoint took the place of, or that were used longest ago. No torch."""

import contextlib
import itertools
import re
import time
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from snapcap.warmup.machine.files import locked_alone
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.store import WEIGHTS, StoreError
from snapcap.warmup.weights.key import PREPARED_NAME
from snapcap.warmup.weights.records import RECORD_NAME, Record, read_record

# A file that the process with the lock of preparing writes. Without locks each process writes one of its own.
UNFINISHED = ".writing"
# Names of a content that is fetched: its lock, the file that is written, and the file that is verified until it is
# on the disk. Without locks each process writes a file of its own here too.
LOCK, WRITING, VERIFIED = "lock", "writing", "verified"
_FETCHING = re.compile(rf"\.([0-9a-f]{{64}})\.(?:{LOCK}|{WRITING}(?:\.[0-9a-f]{{32}})?|{VERIFIED})")
_LEFT_BEHIND_S = 3600.0  # without a write: where there are no locks, nobody is writing such a file any more
_KEPT = 8  # prepared files of a folder, of which several servers, versions and machines may use some
_LISTED = 10_000


def remove_old(store: FolderStore, name: str, before: Record | None, record: Record) -> None:
    """Remove what prepared weights of this name take the place of.

    Args:
        before: what was recorded of the checkpoint's folder, in whose place ``record`` is now.

    Raises:
        StoreError: something cannot be removed.
    """
    if before is not None and _is_superseded(store, before, record):
        store.delete(f"{WEIGHTS}/{name.replace(record.digest, before.digest)}")
    prune(store)


def fetching_name(content: str, part: str) -> str:
    """Returns the name of a file of a download. ``content``: ``ModelManifest.content``. ``part``: ``LOCK``,
    ``WRITING`` or ``VERIFIED``."""
    return f".{content}.{part}"


def own_name(name: str, alone: bool | None) -> str:
    """The name of a file that is being written: ``name`` for the process that has the lock. Where there are no
    locks, so that ``alone`` is None, no other process writes to a file of that name."""
    return name if alone else f"{name}.{uuid4().hex}"


def remove_unfinished(folder: Path, alone: bool | None) -> None:
    """Remove the files of processes that were killed while they prepared or downloaded weights.

    Args:
        alone: whether this process has the lock of preparing; None where there are no locks.

    Raises:
        OSError: it cannot be removed.
    """
    _remove(folder.glob(f"{UNFINISHED}*"), alone)
    remove_fetched(folder)


def remove_fetched(folder: Path) -> None:
    """Remove the files of killed downloads: those whose lock nobody holds, and their locks. A file that cannot be
    removed stays and does no harm.

    Raises:
        OSError: the folder cannot be read.
    """
    names = (path.name for path in itertools.islice(folder.iterdir(), _LISTED))
    for content in {found[1] for name in names if (found := _FETCHING.fullmatch(name))}:
        lock = folder / fetching_name(content, LOCK)
        with contextlib.suppress(OSError), locked_alone(lock) as alone:
            if alone is not False:
                remove_parts(folder, content, alone)
            if alone:
                lock.unlink(missing_ok=True)  # whoever waits for it finds another file by its name, and tries again


def remove_parts(folder: Path, content: str, alone: bool | None) -> None:
    """Remove what was written of a content.

    Args:
        alone: whether this process has the lock of the content; None where there are no locks.

    Raises:
        OSError: it cannot be removed.
    """
    _remove(folder.glob(f"{fetching_name(content, WRITING)}*"), alone)
    _remove([folder / fetching_name(content, VERIFIED)], alone)


def _remove(files: Iterable[Path], alone: bool | None) -> None:
    """Without locks only files remain untouched that somebody has written to within the hour."""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            if alone or time.time() - file.lstat().st_mtime > _LEFT_BEHIND_S:
                file.unlink()


def readable_record(store: FolderStore, name: str) -> Record | None:
    """A record that can be read and is nobody else's; no other counts."""
    with contextlib.suppress(StoreError):
        return read_record(store, name)
    return None


def _is_superseded(store: FolderStore, before: Record, record: Record) -> bool:
    """Returns whether the checkpoint has replaced the content of its earlier record, and no other record names that
    content. If the files did not change after the earlier record, the path means another folder in another
    container, and both keep their weights."""
    if before.digest == record.digest or all(file.changed <= before.began for file in record.files):
        return False
    names = [name for name in store.newest(WEIGHTS, _LISTED) if RECORD_NAME.fullmatch(Path(name).name)]
    others = [readable_record(store, name) for name in names]
    return all(other is None or other.digest != before.digest for other in others)


def prune(store: FolderStore) -> None:
    """Remove prepared files except those written or used last. Files of other names stay.

    Raises:
        StoreError: something cannot be removed.
    """
    names = [name for name in store.newest(WEIGHTS, _LISTED) if PREPARED_NAME.fullmatch(Path(name).name)]
    for name in names[_KEPT:]:
        store.delete(name)
