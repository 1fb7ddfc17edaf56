"""Removes prepared weights that another checkpoint took the place of, or that were used longest ago. No torch."""

import contextlib
from pathlib import Path

from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.store import WEIGHTS, StoreError
from snapcap.warmup.weights.key import PREPARED_NAME
from snapcap.warmup.weights.records import RECORD_NAME, Record, read_record

UNFINISHED = ".writing"  # of whoever has the lock of the folder's weights, and nobody else
VERIFIED = ".verified"  # what was fetched, all of it verified, until it is on the disk
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


def remove_unfinished(folder: Path) -> None:
    """Remove what a process has left that was killed: for who has the lock, which then is the only one.

    Raises:
        OSError: it cannot be removed.
    """
    for name in (UNFINISHED, VERIFIED):
        (folder / name).unlink(missing_ok=True)


def readable_record(store: FolderStore, name: str) -> Record | None:
    """A record that can be read and is nobody else's; no other counts."""
    with contextlib.suppress(StoreError):
        return read_record(store, name)
    return None


def _is_superseded(store: FolderStore, before: Record, record: Record) -> bool:
    """Whether the checkpoint was changed after the record before, whose content no other record names. Where it was
    not, the place is another one for another container, and each has its weights."""
    if before.digest == record.digest or all(file.changed <= before.began for file in record.files):
        return False
    names = [name for name in store.newest(WEIGHTS, _LISTED) if RECORD_NAME.fullmatch(Path(name).name)]
    others = [readable_record(store, name) for name in names]
    return all(other is None or other.digest != before.digest for other in others)


def prune(store: FolderStore) -> None:
    """Remove prepared files but the last ones that were written or used. What has another name than ours stays.

    Raises:
        StoreError: something cannot be removed.
    """
    names = [name for name in store.newest(WEIGHTS, _LISTED) if PREPARED_NAME.fullmatch(Path(name).name)]
    for name in names[_KEPT:]:
        store.delete(name)
