"""Names the files of weights in an artifact folder, downloads them, and removes unused ones. Imports no torch.

Three kinds of files are removed: the least recently used prepared weights; unfinished files of killed processes;
and, in the cache of a remote store, the least recently used manifests and small files of models, which can be
fetched again. A folder that is the store itself keeps everything published to it. Files of other names always stay.

Weights are downloaded in chunks. Each chunk is verified while it streams.

A download has two steps. The first step ends when every chunk is verified: the file gets a temporary name for
verified files, and the start maps it. The second step syncs the file, which may take longer than the download, and
gives it its final name, by which other processes find it. The next download removes a file without a final name,
like the files of a killed process.
"""

import contextlib
import errno
import hashlib
import itertools
import math
import os
import re
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from uuid import uuid4

from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import CHUNK_BYTES, MAX_ENVELOPE_BYTES, Weights
from snapcap.warmup.artifacts.store import (
    MODEL_FILES,
    MODELS,
    WEIGHTS,
    ArtifactStore,
    DamagedError,
    Ranges,
    StoreError,
    blob_name,
)
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.files import commit, free_bytes, locked_alone, make_folder, remove_left, write_all

# Names of files of weights: prepared on this machine, or fetched.
PREPARED_NAME = re.compile(
    r"[0-9a-f]{64}(\.(cpu|cuda)\.(float32|bfloat16|float16|int8)\.[0-9a-f]{64})?\.safetensors"
)
# A file that the process with the lock of preparing writes. Without locks each process writes one of its own.
UNFINISHED = ".writing"
# Names of a content that is fetched: its lock, the file that is written, and the file that is verified until it is
# on the disk. Without locks each process writes a file of its own here too.
LOCK, WRITING, VERIFIED = "lock", "writing", "verified"
_FETCHING = re.compile(rf"\.([0-9a-f]{{64}})\.(?:{LOCK}|{WRITING}(?:\.[0-9a-f]{{32}})?|{VERIFIED})")
_MANIFEST = re.compile(rf"{MODELS}/[0-9a-f]{{64}}\.json")
_FILES_FOLDER = re.compile(r"[0-9a-f]{64}")
_UNUSED_S = 86_400.0
_KEPT_WEIGHTS = 8  # prepared files of a folder, of which several servers, versions and machines may use some
# Seconds since its last use for which a checkpoint's last used file stays beside these: a server may have more
# models.
_KEPT_S = 30 * 86_400.0
_KEPT_MODELS = 64  # descriptions: as many as one server may have models
_LISTED = 10_000


def fetched_name(content: str) -> str:
    """Returns the name of fetched weights, ``<content>.safetensors``. ``content``: ``Weights.content``."""
    return f"{content}.safetensors"


def fetching_name(content: str, part: str) -> str:
    """Returns the name of a file of a download. ``content``: ``Weights.content``. ``part``: ``LOCK``, ``WRITING``
    or ``VERIFIED``."""
    return f".{content}.{part}"


def own_name(name: str, alone: bool | None) -> str:
    """Returns the name of a file that is being written: ``name`` for the process that holds the lock; without locks
    (``alone`` is None) a unique name, so that no other process writes to the same file."""
    return name if alone else f"{name}.{uuid4().hex}"


def remove_unfinished(folder: Path, alone: bool | None) -> None:
    """Remove the files of processes that were killed while they prepared or downloaded weights. ``alone``: whether
    this process holds the lock for preparing; None without locks. Raises OSError if a file cannot be removed."""
    remove_left(folder.glob(f"{UNFINISHED}*"), alone)
    remove_fetched(folder)


def remove_fetched(folder: Path) -> None:
    """Remove the files of killed downloads: those whose lock nobody holds, and their locks. A file that cannot be
    removed stays and does no harm. Raises OSError if the folder cannot be read."""
    names = (path.name for path in itertools.islice(folder.iterdir(), _LISTED))
    for content in {found[1] for name in names if (found := _FETCHING.fullmatch(name))}:
        lock = folder / fetching_name(content, LOCK)
        with contextlib.suppress(OSError), locked_alone(lock) as alone:
            if alone is not False:
                remove_parts(folder, content, alone)
            if alone:
                lock.unlink(missing_ok=True)  # a process that waits for it notices the new file and tries again


def remove_parts(folder: Path, content: str, alone: bool | None) -> None:
    """Remove the unfinished files of a download. ``alone``: whether this process holds the download's lock; None
    without locks. Raises OSError if the folder cannot be read."""
    remove_left(folder.glob(f"{fetching_name(content, WRITING)}*"), alone)
    remove_left([folder / fetching_name(content, VERIFIED)], alone)


def prune_weights(store: FolderStore, used: str) -> None:
    """Remove prepared files except those written or used last: of the folder, and for ``_KEPT_S`` seconds of each
    checkpoint, device and dtype. ``used``: the name of a file that stays even if all others have later times, as
    they have after the clock was set back. Raises StoreError if something cannot be removed."""
    seen: set[tuple[str, ...]] = set()
    for number, name in enumerate(_prepared(store)):
        kind = tuple(Path(name).name.split(".")[:3])  # checkpoint, device and dtype; of fetched weights the content
        is_last = kind not in seen
        seen.add(kind)
        if number >= _KEPT_WEIGHTS and name != used and not (is_last and _unused_s(store, name) < _KEPT_S):
            store.delete(name)


def _unused_s(store: FolderStore, name: str) -> float:
    """Returns the seconds since a file was last used; infinity if another process has removed the file."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - store.path(name).lstat().st_mtime
    return math.inf


def make_room(store: FolderStore, size: int) -> bool:
    """Returns whether `size` bytes of the store's disk are free. If they are not, removes prepared files that no
    start has used for a day, the least recently used first. Removes nothing if all of them together are too small.
    Raises StoreError if a file cannot be removed."""
    folder = store.root / WEIGHTS
    if free_bytes(folder) >= size:
        return True
    unused: dict[str, int] = {}  # bytes on the disk
    for name in reversed(_prepared(store)):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            found = store.path(name).lstat()
            if time.time() - found.st_mtime < _UNUSED_S:
                break
            unused[name] = 512 * found.st_blocks  # a block of stat(2) has 512 bytes
    if free_bytes(folder) + sum(unused.values()) < size:
        return False
    for name in unused:
        if free_bytes(folder) >= size:
            break
        with contextlib.suppress(FileNotFoundError):
            store.delete(name)
    return free_bytes(folder) >= size


def _prepared(store: FolderStore) -> list[str]:
    """Returns the names of prepared files, the last used one first."""
    return [name for name in store.newest(WEIGHTS, _LISTED) if PREPARED_NAME.fullmatch(Path(name).name)]


def mark_used(*paths: Path) -> None:
    """Set the time of last use of small files and a manifest, if they are writable."""
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


def _remove_small_files(folder: Path) -> None:
    """Removes a folder of small files. If the folder has other entries, they stay, and so does the folder."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if file.is_symlink() or not file.is_file():
                return
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


_THREADS = 8
_POLL_S = 0.05
# Longest time without a write of another process that fetches the same weights; after it, the wait is given up.
_SILENT_S = 10.0


def download_weights(
    source: ArtifactStore, local: FolderStore, weights: Weights, until: float, scope: contextlib.ExitStack
) -> int:
    """Downloads a model's weights to the folder and verifies every byte.

    Returns the bytes downloaded: the file then has its ``VERIFIED`` name, and the caller must call ``finish``.
    Returns 0 if another process has downloaded the file. Raises DamagedError if the source has other bytes than the
    manifest says, and StoreError if the source cannot be read, the disk cannot be written, or the time is over.

    Args:
        until: the moment of ``time.monotonic()`` to give up at.
        scope: keeps the download's lock, and the file, until ``finish`` or until the scope ends.
    """
    folder, content = local.root / WEIGHTS, weights.content
    path = folder / fetched_name(content)
    try:
        make_folder(folder)
        alone = _lock(folder, content, until, scope)
        if local.size(f"{WEIGHTS}/{path.name}") == weights.size:  # another process downloaded it meanwhile
            return 0
        remove_parts(folder, content, alone)
        remove_fetched(folder)  # files of other downloads that nobody fetches now
        temporary = folder / own_name(fetching_name(content, WRITING), alone)
        size = weights.size
        if not make_room(local, size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        scope.callback(remove_parts, folder, content, alone)
        scope.callback(temporary.unlink, missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        os.ftruncate(descriptor, size)
        with source.ranges(blob_name(weights.file), size, until) as read:
            _fill(descriptor, read, weights, until)
        os.replace(temporary, folder / fetching_name(content, VERIFIED))
    except OSError as error:
        raise StoreError(f"weights cannot be written to {folder}: {os_error_text(error)}") from error
    os.close(descriptor)  # not after an error: a thread may still write to this number, then of another file
    return size


def finish(local: FolderStore, weights: Weights) -> None:
    """Sync a file of ``download_weights`` to the disk and give it its final name. Raises StoreError if the file
    cannot be kept; processes that have mapped the file keep its content."""
    folder = local.root / WEIGHTS
    try:
        verified = folder / fetching_name(weights.content, VERIFIED)
        commit(verified, folder / fetched_name(weights.content))
    except OSError as error:
        raise StoreError(f"weights cannot be kept in {folder}: {os_error_text(error)}") from error
    with contextlib.suppress(StoreError):  # the next download removes any file that stays
        prune_weights(local, f"{WEIGHTS}/{fetched_name(weights.content)}")


def _lock(folder: Path, content: str, until: float, scope: contextlib.ExitStack) -> bool | None:
    """Takes the lock of a download. Waits for another process that fetches the same weights while it makes
    progress. Returns the result of ``take_lock``, never False. Raises StoreError if the other process stalls."""
    path = folder / fetching_name(content, LOCK)
    seen, since = -1, time.monotonic()
    while True:
        with contextlib.ExitStack() as entering:
            alone = entering.enter_context(locked_alone(path))
            if alone is not False:
                scope.push(entering.pop_all())
                return alone
        now, written = time.monotonic(), _written(folder, content)
        if written != seen:
            seen, since = written, now
        if now >= until or now - since >= _SILENT_S:
            raise StoreError(f"another process fetches these weights to {folder}, and makes no progress")
        time.sleep(_POLL_S)


def _written(folder: Path, content: str) -> int:
    """Returns the time of the last write to a download, in nanoseconds since the epoch; 0 without a file."""
    with contextlib.suppress(OSError):
        return (folder / fetching_name(content, WRITING)).stat().st_mtime_ns
    return 0


def _fill(descriptor: int, read: Ranges, weights: Weights, until: float) -> None:
    """Downloads all chunks in several threads. Raises StoreError at ``until``."""
    over = threading.Event()
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="snapcap-weights")
    try:
        numbers = range(len(weights.chunks))
        chunks = [pool.submit(_chunk, descriptor, read, weights, number, over) for number in numbers]
        done, pending = wait(chunks, max(0.0, until - time.monotonic()), FIRST_EXCEPTION)
        for chunk in done:
            chunk.result()
        if pending:
            raise StoreError("the weights did not arrive before the deadline; raise it or check the network")
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _chunk(descriptor: int, read: Ranges, weights: Weights, number: int, over: threading.Event) -> None:
    start = number * CHUNK_BYTES
    end = min(start + CHUNK_BYTES, weights.size)
    digest = hashlib.sha256()
    for piece in read(start, end):
        if over.is_set():
            return
        if len(piece) > end - start:  # no source writes past its chunk
            raise DamagedError("the store sent more bytes than were requested")
        digest.update(piece)
        write_all(descriptor, piece, start)
        start += len(piece)
    if start != end or digest.hexdigest() != weights.chunks[number]:
        raise DamagedError(f"chunk {number} of {blob_name(weights.file)} does not match the manifest's digest")
