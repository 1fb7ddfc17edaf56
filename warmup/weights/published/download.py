"""Downloads prepared weights in chunks, each of which is verified while it streams, whole or not at all.

A download becomes a file of the cache in two steps. The first step ends when every chunk is verified: the file gets
a name that says so, and the start maps it. The second step syncs the file, which may take longer than the download,
and gives it its final name, by which other processes find it. A file without its final name is removed by the next
download, like the files of a killed process.
"""

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.model_manifest import CHUNK_BYTES, ModelManifest
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.files import free_bytes, locked_alone, make_folder, write_all
from snapcap.warmup.store.blobs import commit
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.store import WEIGHTS, ArtifactStore, DamagedError, Ranges, StoreError, blob_name
from snapcap.warmup.weights.key import fetched_name
from snapcap.warmup.weights.old import (
    LOCK,
    VERIFIED,
    WRITING,
    fetching_name,
    own_name,
    prune,
    remove_fetched,
    remove_parts,
)

_THREADS = 8
_POLL_S = 0.05
# In which another process that fetches the same must have written something: else it is not waited for.
_SILENT_S = 10.0


@dataclass(frozen=True)
class Downloaded:
    """``bytes_fetched``: 0 where another process had the file by then. ``unfinished``: whether the file is there as
    ``VERIFIED``, and ``finish`` is to be called."""

    bytes_fetched: int
    unfinished: bool


def download_weights(
    source: ArtifactStore, local: FolderStore, manifest: ModelManifest, until: float, scope: contextlib.ExitStack
) -> Downloaded:
    """Have the weights of a manifest in the folder, every byte of them verified.

    Args:
        until: the moment of ``time.monotonic()`` to give up at.
        scope: keeps the lock of this content, and the file, until ``finish`` or its end.

    Raises:
        DamagedError: the source has other bytes than the manifest says.
        StoreError: the source, the disk, or the time.
    """
    folder, content = local.root / WEIGHTS, manifest.content
    path = folder / fetched_name(content)
    try:
        make_folder(folder)
        alone = _lock(folder, content, until, scope)
        if local.size(f"{WEIGHTS}/{path.name}") == manifest.weights.size:  # another process brought it meanwhile
            return Downloaded(0, unfinished=False)
        remove_parts(folder, content, alone)
        remove_fetched(folder)  # files of other downloads that nobody fetches now
        temporary = folder / own_name(fetching_name(content, WRITING), alone)
        size = manifest.weights.size
        if size > free_bytes(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        scope.callback(remove_parts, folder, content, alone)
        scope.callback(temporary.unlink, missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        os.ftruncate(descriptor, size)
        with source.ranges(blob_name(manifest.weights), size, until) as read:
            _fill(descriptor, read, manifest, until)
        os.replace(temporary, folder / fetching_name(content, VERIFIED))
    except OSError as error:
        raise StoreError(f"weights cannot be written to {folder}: {os_error_text(error)}") from error
    os.close(descriptor)  # not where a thread may still write to it: its number may be another file's by then
    return Downloaded(size, unfinished=True)


def finish(local: FolderStore, manifest: ModelManifest) -> None:
    """Give what ``download_weights`` left unfinished its name, once it is on the disk.

    Raises:
        StoreError: it cannot be kept; who has it mapped keeps it.
    """
    folder = local.root / WEIGHTS
    try:
        verified = folder / fetching_name(manifest.content, VERIFIED)
        commit(verified, folder / fetched_name(manifest.content))
    except OSError as error:
        raise StoreError(f"weights cannot be kept in {folder}: {os_error_text(error)}") from error
    with contextlib.suppress(StoreError):  # the next download removes any file that stays
        prune(local)


def _lock(folder: Path, content: str, until: float, scope: contextlib.ExitStack) -> bool | None:
    """Have the lock of a content, or wait for the process that fetches the same, as long as that goes on.

    Returns:
        The result of ``take_lock``, which is never False here.
    """
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
            raise StoreError(f"another process fetches these weights to {folder}, and does not go on")
        time.sleep(_POLL_S)


def _written(folder: Path, content: str) -> int:
    """When something was last written of a content that is fetched, in nanoseconds; 0 where there is nothing."""
    with contextlib.suppress(OSError):
        return (folder / fetching_name(content, WRITING)).stat().st_mtime_ns
    return 0


def _fill(descriptor: int, read: Ranges, manifest: ModelManifest, until: float) -> None:
    """All chunks, several at a time."""
    over = threading.Event()
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="snapcap-weights")
    try:
        numbers = range(len(manifest.chunks))
        chunks = [pool.submit(_chunk, descriptor, read, manifest, number, over) for number in numbers]
        done, pending = wait(chunks, max(0.0, until - time.monotonic()), FIRST_EXCEPTION)
        for chunk in done:
            chunk.result()
        if pending:
            raise StoreError("the weights did not come before the deadline; raise it or check the network")
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _chunk(descriptor: int, read: Ranges, manifest: ModelManifest, number: int, over: threading.Event) -> None:
    start = number * CHUNK_BYTES
    end = min(start + CHUNK_BYTES, manifest.weights.size)
    digest = hashlib.sha256()
    for piece in _no_more(read(start, end), end - start):
        if over.is_set():
            return
        digest.update(piece)
        write_all(descriptor, piece, start)
        start += len(piece)
    if start != end or digest.hexdigest() != manifest.chunks[number]:
        raise DamagedError(f"chunk {number} of {blob_name(manifest.weights)} is not what the manifest says")


def _no_more(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Pieces of so many bytes in all: no source writes past its chunk."""
    for piece in pieces:
        size -= len(piece)
        if size < 0:
            raise DamagedError("the store sent more bytes than it was asked for")
        yield piece
