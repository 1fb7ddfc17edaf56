"""Removes descriptions of models that were fetched from a store and used longest ago.

Only where the folder is a cache of that store, from which all of it comes again: a folder that is the store itself
keeps what was published to it.
"""

import contextlib
import os
import re
from pathlib import Path

from snapcap.warmup.artifacts.envelope import MAX_ENVELOPE_BYTES
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.store import MODEL_FILES, MODELS, StoreError

_KEPT = 16  # models, of which several servers that share the folder may use some
_LISTED = 10_000
_MANIFEST = re.compile(rf"{MODELS}/[0-9a-f]{{64}}\.json")
_FOLDER = re.compile(r"[0-9a-f]{64}")


def mark_used(*paths: Path) -> None:
    """Note that small files and a manifest were used now, where they may be written to."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)


def prune_models(cache: FolderStore) -> None:
    """Remove all manifests and small files except those fetched or used last. Manifests of models built in the
    folder stay, as do files of other names and files that cannot be removed."""
    with contextlib.suppress(StoreError, OSError):
        names = [name for name in cache.newest(MODELS, _LISTED) if _MANIFEST.fullmatch(name)]
        for name in names[_KEPT:]:
            stored = cache.read(name, MAX_ENVELOPE_BYTES)
            if stored is not None and not cache.is_vouched(stored.data):
                cache.delete(name)
    with contextlib.suppress(OSError):
        folders = [each for each in (cache.root / MODEL_FILES).iterdir() if _FOLDER.fullmatch(each.name)]
        times = {each: each.lstat().st_mtime_ns for each in folders[:_LISTED] if not each.is_symlink()}
        for folder in sorted(times, key=lambda each: times[each], reverse=True)[_KEPT:]:
            _remove(folder)


def _remove(folder: Path) -> None:
    """A folder of small files; whatever else is in it stays, and the folder with it."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if file.is_symlink() or not file.is_file():
                return
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
