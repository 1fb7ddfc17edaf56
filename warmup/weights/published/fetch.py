"""Finds a published model in a store: its manifest, signed and of the revision that is meant, and its small files.

    folder's manifest ─┐                  ┌ small files ─ digests ─▶ a folder as a checkpoint's, without weights
    store's manifest ──┴ signature ─ revision
    the source's list ───────────────────┘

Nothing that is found in a store can fail a start: each failure is a result with a reason.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.envelope import MAX_ENVELOPE_BYTES, ManifestError, UntrustedError
from snapcap.warmup.artifacts.key import Factors, artifact_key, canonical_json
from snapcap.warmup.artifacts.model_manifest import ModelManifest, open_model
from snapcap.warmup.artifacts.signing import Trust
from snapcap.warmup.checkpoints.patterns import OUTAGE_S, CheckpointError
from snapcap.warmup.errors import first_line
from snapcap.warmup.machine.files import make_folder
from snapcap.warmup.store.blobs import ChangedError, VerifiedFile, commit
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.packs import bring_blobs
from snapcap.warmup.store.store import (
    MODEL_FILES,
    WEIGHTS,
    ArtifactStore,
    DamagedError,
    StoreError,
    blob_name,
    model_name,
)
from snapcap.warmup.weights.key import fetched_name

FetchResult = Literal["hit", "miss", "corrupt", "untrusted", "error"]
Identity = Mapping[str, str]


class NotFetchedError(Exception):
    """No published weights were fetched. ``result`` names the kind of failure, and ``reason`` explains it in a
    line."""

    def __init__(self, result: FetchResult, reason: str) -> None:
        super().__init__(reason)
        self.result: FetchResult = result
        self.reason = reason

    @classmethod
    def of(cls, error: Exception) -> "NotFetchedError":
        """Maps any error of a store, manifest or checkpoint to a fetch result."""
        match error:
            case NotFetchedError():
                return error
            case UntrustedError():
                return cls("untrusted", str(error))
            case ManifestError() | DamagedError() | ChangedError():
                return cls("corrupt", str(error))
            case StoreError() | CheckpointError():
                return cls("error", str(error))
        return cls("error", f"unexpected: {type(error).__name__}: {first_line(error)}")


@dataclass(frozen=True)
class FoundModel:
    """A verified manifest; ``vouched``: the folder's owner built it there, or vouches for all that is there.

    unasked: why the source was not asked for its revision, where it could not be; else empty.
    """

    manifest: ModelManifest
    vouched: bool
    unasked: str = ""


def local_model(local: FolderStore, key: str, trust: Trust) -> FoundModel | None:
    """The manifest of a key in the folder, which was built there or brought there; None without one.

    Raises:
        ManifestError: it is damaged, or nobody trusted has signed it.
        StoreError: it cannot be read.
    """
    stored = local.read(model_name(key), MAX_ENVELOPE_BYTES)
    if stored is None:
        return None
    vouched = trust.owner_suffices or local.is_vouched(stored.data)
    return FoundModel(open_model(stored.data, key, trust.of_owner if vouched else trust), vouched)


def find_model(
    remote: ArtifactStore | None,
    local: FolderStore,
    factors: Factors,
    trust: Trust,
    identify: Callable[[], Identity],
    until: float,
) -> FoundModel:
    """Bring the manifest and the small files of a published model to the folder. Where the source does not say its
    revision within ``OUTAGE_S``, a model that is in the folder as a whole is used as it is.

    Args:
        remote: None where the folder is the store.
        factors: ``weights.key.model_factors``.
        identify: asks the source for its revision.
        until: the moment of ``time.monotonic()`` to give up downloads at.

    Raises:
        NotFetchedError: there is none that may be used.
    """
    try:
        key = artifact_key(factors)
        pool = ThreadPoolExecutor(1, thread_name_prefix="snapcap-source")
        identity = pool.submit(identify)  # two answers for the time of one
        pool.shutdown(wait=False)
        found, why = _at_hand(local, key, trust)
        if found is not None and _is_whole(local, found):
            unasked = _unasked(identity, min(OUTAGE_S, (until - time.monotonic()) / 2))
            if unasked:
                return replace(found, unasked=unasked)
        if remote is not None and (found is None or not _is_of(found, identity)):
            found = _from_remote(remote, local, key, trust)
        if found is None:
            where = (remote or local).location
            wanted = f"{factors['model.source']} for {factors['device.type']}, {factors['model.dtype']}"
            raise why or NotFetchedError("miss", f"no prepared weights of {wanted} in {where}")
        if not _is_of(found, identity):
            raise NotFetchedError(
                "miss", "the published weights are of another revision; run snapcap build --weights again"
            )
        if described(local, found.manifest) is None:
            _bring_files(remote or local, local, found.manifest, until)
    except Exception as error:
        raise NotFetchedError.of(error) from error
    else:
        return found


def described(local: FolderStore, manifest: ModelManifest) -> Path | None:
    """The folder of the small files, all of them verified; None where one is missing or not as it should be."""
    folder = _files_folder(local, manifest)
    try:
        for name, blob in manifest.files.items():
            VerifiedFile(folder / name, blob).read()
    except OSError:
        return None
    return folder


def weights_at_hand(local: FolderStore, found: FoundModel) -> str | None:
    """The name of the weights' file in the folder, if it is there: as it was fetched, every byte verified; or as
    its owner has published it there."""
    blob = found.manifest.weights
    names = [f"{WEIGHTS}/{fetched_name(found.manifest.content)}", *([blob_name(blob)] if found.vouched else [])]
    return next((name for name in names if local.size(name) == blob.size), None)


def _is_whole(local: FolderStore, found: FoundModel) -> bool:
    """Returns whether the folder has all of a model: its small files, verified, and its weights."""
    return described(local, found.manifest) is not None and weights_at_hand(local, found) is not None


def _unasked(identity: "Future[Identity]", seconds: float) -> str:
    """Why the source does not say its revision within so many seconds; empty if it does."""
    try:
        identity.result(max(0.0, seconds))
    except TimeoutError:
        return f"no answer within {seconds:.0f} s"
    except CheckpointError as error:
        return str(error)
    return ""


def _at_hand(local: FolderStore, key: str, trust: Trust) -> tuple[FoundModel | None, NotFetchedError | None]:
    """Returns the model in the folder, or the error of reading it, which is reported only if the remote has no
    model either."""
    try:
        return local_model(local, key, trust), None
    except (ManifestError, StoreError) as error:
        return None, NotFetchedError.of(error)


def _from_remote(remote: ArtifactStore, local: FolderStore, key: str, trust: Trust) -> FoundModel | None:
    stored = remote.read(model_name(key), MAX_ENVELOPE_BYTES)
    if stored is None:
        return None
    manifest = open_model(stored.data, key, trust)
    local.keep(model_name(key), stored.data)
    return FoundModel(manifest, trust.owner_suffices)


def _is_of(found: FoundModel, identity: "Future[Identity]") -> bool:
    return dict(found.manifest.identity) == dict(identity.result())


def _bring_files(source: ArtifactStore, local: FolderStore, manifest: ModelManifest, until: float) -> None:
    folder = _files_folder(local, manifest)
    blobs = set(manifest.files.values())
    with local.scratch() as scratch:
        brought = dict(bring_blobs(source, blobs, blobs, scratch, until))
        for name, blob in manifest.files.items():
            data = VerifiedFile(brought[blob], blob).read()
            copy = scratch / f"{blob.digest}.copy"  # two names may have one content
            copy.write_bytes(data)
            make_folder(folder)
            commit(copy, folder / name, durable=False)  # verified whenever it is used


def _files_folder(local: FolderStore, manifest: ModelManifest) -> Path:
    """Named by what is in it: a file is never replaced by another while somebody uses it."""
    listed = {name: blob.digest for name, blob in manifest.files.items()}
    return local.path(f"{MODEL_FILES}/{hashlib.sha256(canonical_json(listed)).hexdigest()}")
