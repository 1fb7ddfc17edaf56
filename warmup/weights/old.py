"""Removes prepared weights that another checkpoint took the place of, or that were used longest ago. No torch."""

import contextlib
import itertools
import re
from pathlib import Path

from snapcap.warmup.machine.files import locked_alone
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.store import WEIGHTS, StoreError
from snapcap.warmup.weights.key import PREPARED_NAME
from snapcap.warmup.weights.records import RECORD_NAME, Record, read_record

UNFINISHED = ".writing"  # of whoever has the lock of preparing, and nobody else
# Of what is fetched, by the lock of its content: what is written, and what is verified until it is on the disk.
LOCK, WRITING, VERIFIED = "lock", "writing", "verified"
_FETCHING = re.compile(rf"\.([0-9a-f]{{64}})\.(?:{LOCK}|{WRITING}|{VERIFIED})")
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
    """Of a content that is fetched (``ModelManifest.content``): ``LOCK``, ``WRITING`` or ``VERIFIED``."""
    return f".{content}.{part}"


def remove_unfinished(folder: Path) -> None:
    """Remove what a process has left that was killed while it prepared: for who has that lock, and what killed
    downloads have left.

    Raises:
        OSError: it cannot be removed.
    """
    (folder / UNFINISHED).unlink(missing_ok=True)
    remove_fetched(folder)


def remove_fetched(folder: Path) -> None:
    """Remove what downloads have left that were killed: all whose lock nobody has, and these locks. What cannot be
    removed stays, as it is in nobody's way.

    Raises:
        OSError: the folder cannot be read.
    """
    names = (path.name for path in itertools.islice(folder.iterdir(), _LISTED))
    for content in {found[1] for name in names if (found := _FETCHING.fullmatch(name))}:
        lock = folder / fetching_name(content, LOCK)
        with contextlib.suppress(OSError), locked_alone(lock) as alone:
            if alone:
                remove_parts(folder, content)
                lock.unlink(missing_ok=True)  # whoever waits for it finds another file by its name, and tries again


def remove_parts(folder: Path, content: str) -> None:
    """Remove what is being written of a content: for who has its lock.

    Raises:
        OSError: it cannot be removed.
    """
    for part in (WRITING, VERIFIED):
        (folder / fetching_name(content, part)).unlink(missing_ok=True)


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
