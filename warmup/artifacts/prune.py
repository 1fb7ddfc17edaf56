"""Names the files of weights in an artifact folder, and removes those that nobody needs any more. No torch.

Three things are removed: prepared weights except those used last; files of processes that were killed while they
wrote weights; and, in the cache of a store, descriptions of models except those used last, as all of them can be
fetched again. A folder that is the store itself keeps what was published to it. Files of other names always stay.
"""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import MAX_ENVELOPE_BYTES
from snapcap.warmup.artifacts.store import MODEL_FILES, MODELS, WEIGHTS, StoreError
from snapcap.warmup.machine.files import locked_alone

# Names of files of weights: prepared on this machine, or fetched.
PREPARED_NAME = re.compile(r"[0-9a-f]{64}(\.(cpu|cuda)\.(float32|bfloat16|float16)\.[0-9a-f]{64})?\.safetensors")
# A file that the process with the lock of preparing writes. Without locks each process writes one of its own.
UNFINISHED = ".writing"
# Names of a content that is fetched: its lock, the file that is written, and the file that is verified until it is
# on the disk. Without locks each process writes a file of its own here too.
LOCK, WRITING, VERIFIED = "lock", "writing", "verified"
_FETCHING = re.compile(rf"\.([0-9a-f]{{64}})\.(?:{LOCK}|{WRITING}(?:\.[0-9a-f]{{32}})?|{VERIFIED})")
_MANIFEST = re.compile(rf"{MODELS}/[0-9a-f]{{64}}\.json")
_FILES_FOLDER = re.compile(r"[0-9a-f]{64}")
_KEPT_WEIGHTS = 8  # prepared files of a folder, of which several servers, versions and machines may use some
_KEPT_MODELS = 16  # descriptions, of which several servers that share the folder may use some
_LISTED = 10_000
_LEFT_BEHIND_S = 3600.0  # without a write: where there are no locks, nobody is writing such a file any more


def fetched_name(content: str) -> str:
    """``<content>.safetensors``: fetched weights, for whoever names the same ``Weights.content``."""
    return f"{content}.safetensors"


def fetching_name(content: str, part: str) -> str:
    """Returns the name of a file of a download. ``content``: ``Weights.content``. ``part``: ``LOCK``, ``WRITING``
    or ``VERIFIED``."""
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
    _remove_left(folder.glob(f"{UNFINISHED}*"), alone)
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
    _remove_left(folder.glob(f"{fetching_name(content, WRITING)}*"), alone)
    _remove_left([folder / fetching_name(content, VERIFIED)], alone)


def prune_weights(store: FolderStore) -> None:
    """Remove prepared files except those written or used last.

    Raises:
        StoreError: something cannot be removed.
    """
    names = [name for name in store.newest(WEIGHTS, _LISTED) if PREPARED_NAME.fullmatch(Path(name).name)]
    for name in names[_KEPT_WEIGHTS:]:
        store.delete(name)


def mark_used(*paths: Path) -> None:
    """Note that small files and a manifest were used now, where they may be written to."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)


def prune_models(cache: FolderStore) -> None:
    """Remove all manifests and small files of models except those fetched or used last. Manifests of models built
    in the folder stay, as do files that cannot be removed."""
    with contextlib.suppress(StoreError, OSError):
        names = [name for name in cache.newest(MODELS, _LISTED) if _MANIFEST.fullmatch(name)]
        for name in names[_KEPT_MODELS:]:
            stored = cache.read(name, MAX_ENVELOPE_BYTES)
            if stored is not None and not cache.is_vouched(stored.data):
                cache.delete(name)
    with contextlib.suppress(OSError):
        folders = [each for each in (cache.root / MODEL_FILES).iterdir() if _FILES_FOLDER.fullmatch(each.name)]
        times = {each: each.lstat().st_mtime_ns for each in folders[:_LISTED] if not each.is_symlink()}
        for folder in sorted(times, key=lambda each: times[each], reverse=True)[_KEPT_MODELS:]:
            _remove_small_files(folder)


def _remove_left(files: Iterable[Path], alone: bool | None) -> None:
    """Without locks only files remain untouched that somebody has written to within the hour."""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            if alone or time.time() - file.lstat().st_mtime > _LEFT_BEHIND_S:
                file.unlink()


def _remove_small_files(folder: Path) -> None:
    """Removes a folder of small files. Whatever else is in it stays, and the folder with it."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if file.is_symlink() or not file.is_file():
                return
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
