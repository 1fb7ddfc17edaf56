"""Fetches artifacts: returns verified files in the local folder, or the reason why there are none.

    local folder ─ built there, or signature ─ digests ──────────────────▶ hit
         └─ neither ─ remote manifest ─ signature ─ missing blobs ─ digests ─ local folder ─▶ hit

The files of an artifact set become blobs in the folder. The small files of a model become a folder like a
checkpoint's without weights, and must be of the source's present revision. ``artifacts.download`` fetches the
model's weights in chunks.

If trusted keys are configured and unsigned artifacts are not allowed, a manifest is used only if one of these keys
signed it, or if the local folder's owner built it there. Each start verifies this again, also for a cached
manifest.

No content of a store can fail a start: ``Fetched.failed`` maps each error to a result with a reason.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import UserError
from snapcap.warmup.artifacts.download import fetched_name
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import Difference, Factors, artifact_key, canonical_json, differing, is_stale
from snapcap.warmup.artifacts.manifest import (
    IMAGE_LIBRARY,
    MAX_ENVELOPE_BYTES,
    Blob,
    ChangedError,
    Manifest,
    ManifestError,
    UntrustedError,
    VerifiedFile,
    Weights,
    open_envelope,
)
from snapcap.warmup.artifacts.packs import download_blobs
from snapcap.warmup.artifacts.signing import OWNER, KeyFileError, Trust
from snapcap.warmup.artifacts.store import (
    MANIFESTS,
    MODEL_FILES,
    WEIGHTS,
    ArtifactStore,
    DamagedError,
    StoreError,
    blob_name,
    manifest_name,
    model_name,
)
from snapcap.warmup.checkpoints.local import OUTAGE_S, CheckpointError
from snapcap.warmup.errors import first_line
from snapcap.warmup.machine.files import write_file
from snapcap.warmup.machine.worker import begin, within

Result = Literal["hit", "miss", "stale", "corrupt", "untrusted", "error"]
Identity = Mapping[str, str]
# Advice for results whose reason contains none.
_BUILD = "run `snapcap build` with the same options"
_REMEDIES: Mapping[Result, str] = {
    "miss": _BUILD,
    "stale": _BUILD,
    "corrupt": f"{_BUILD}, which publishes them again",
    "untrusted": f"name the key that signed them with --trusted-key, or {_BUILD} and --sign-key",
}

_COMPARED = 16  # latest manifests of a store that are compared to explain a miss

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """Holds the result of a fetch.

    reason: a line that explains the result, with advice where the user can act.
    entries: on a hit of a set, the verified local files by the manifest's entry names; else empty.
    bytes_fetched: bytes downloaded, whatever the result. seconds: duration of the whole fetch.
    differences: on a miss or stale, the factors in which the nearest manifest differs.
    unasked: why the revision of the model's source is unknown, such as a network error; empty if it is known."""

    result: Result
    reason: str
    entries: Mapping[str, VerifiedFile] = field(default_factory=dict)
    bytes_fetched: int = 0
    seconds: float = 0.0
    manifest: Manifest | None = None
    differences: tuple[Difference, ...] = ()
    unasked: str = ""

    @classmethod
    def failed(cls, error: Exception) -> "Fetched":
        """Maps any error of a store, manifest or checkpoint to the result of a fetch."""
        match error:
            case NotFetchedError():
                return error.fetched
            case UntrustedError():
                return cls("untrusted", str(error))
            case ManifestError() | DamagedError() | ChangedError():
                return cls("corrupt", str(error))
            case UserError() | KeyFileError():
                return cls("error", str(error))
        _log.error("fetching artifacts failed in an unexpected way", exc_info=error)
        return cls("error", f"unexpected: {type(error).__name__}: {first_line(error)}")

    @property
    def unusable(self) -> bool:
        """True if the store has a set of this key that no server can load: a new set must replace it."""
        return self.result in ("corrupt", "untrusted")

    @property
    def in_the_way(self) -> bool:
        """True if the local folder may have an incomplete or unusable set of this key, which a build here must
        replace. An error of the remote store counts too: it may hide such a set."""
        return self.result not in ("miss", "stale")

    @property
    def remedy(self) -> str:
        """Returns advice to the operator about the result; empty on a hit, or if `reason` contains advice."""
        return _REMEDIES.get(self.result, "")


class NotFetchedError(Exception):
    """Says that artifacts were not fetched. ``fetched``: the result, which is no hit, with the reason."""

    def __init__(self, fetched: Fetched) -> None:
        super().__init__(fetched.reason)
        self.fetched = fetched


@dataclass(frozen=True)
class Artifacts:
    """Holds the artifact key of a start and the result of its lookup."""

    key: str
    factors: Factors
    fetched: Fetched

    @property
    def hit(self) -> bool:
        return self.fetched.result == "hit"

    @property
    def input_specs(self) -> Mapping[str, Any]:
        """Returns the input specs (shapes, strides, dtypes) of each package by entry name; empty without a set."""
        specs = self.fetched.manifest.metadata.get("signatures") if self.fetched.manifest else None
        return specs if isinstance(specs, dict) else {}

    def image_library(self) -> bytes | None:
        """Returns the content of the image library, or None if the artifacts lack it or it cannot be read."""
        library = self.fetched.entries.get(IMAGE_LIBRARY)
        try:
            return None if library is None else library.read()
        except OSError as error:
            _log.warning("no image library", extra={"fields": {"reason": str(error)}})
            return None


@dataclass(frozen=True)
class Found:
    """Holds a verified manifest.

    vouched: the local folder's owner built it there, or the folder's owner is trusted for all its content.
    unasked: as in ``Fetched``."""

    manifest: Manifest
    vouched: bool
    unasked: str = ""

    @property
    def weights(self) -> Weights:
        """Returns the description of the model's weights."""
        return self.manifest.model_weights


def fetch(
    remote: ArtifactStore | None, local: FolderStore, key: str, factors: Factors, trust: Trust, deadline: float
) -> Fetched:
    """Fetches the artifact set of a key into the local folder and verifies every byte.

    Args:
        local: the folder that is searched first.
        key: ``artifact_key(factors)``.
        trust: the accepted signers. Without keys, everything in ``local`` is accepted: only its owner writes there.
        deadline: seconds that the remote store may take, even if it never answers.
    """
    started = time.monotonic()
    transfer = _Transfer(local, manifest_name(key), key, trust, started + deadline)
    found = _attempt(_set_of_folder, transfer, factors)
    if found.result != "hit" and remote is not None:
        local_result = found
        try:
            found = within(deadline, partial(_attempt, _set_of_remote, transfer, factors, remote), "artifacts")
        except TimeoutError:
            found = Fetched(
                "error", f"the artifact store did not answer within {deadline:g} s; check endpoint and network"
            )
        if local_result.in_the_way and not found.in_the_way:
            found = local_result
        elif local_result.in_the_way and found.result == "error":
            found = replace(found, reason=f"{found.reason}; and {local_result.reason}")
    return replace(found, seconds=time.monotonic() - started, bytes_fetched=transfer.bytes_fetched)


def fetch_model(
    remote: ArtifactStore | None,
    local: FolderStore,
    factors: Factors,
    trust: Trust,
    identify: Callable[[], Identity],
    until: float,
) -> Found:
    """Fetches the manifest and the small files of a published model into the folder. If the source does not answer
    with its revision within ``OUTAGE_S`` seconds, a complete model in the folder is used as it is. Raises
    NotFetchedError if there is no usable published model.

    Args:
        remote: None if the folder is the store.
        factors: ``weights.find.model_factors``.
        identify: asks the source for its revision.
        until: the moment of ``time.monotonic()`` to give up downloads at.
    """
    try:
        key = artifact_key(factors)
        transfer = _Transfer(local, model_name(key), key, trust, until)
        identity = begin(identify, "snapcap-source")  # while the store is read
        found, why, envelope = None, None, None
        try:
            found = transfer.local_manifest()
        except (ManifestError, StoreError) as error:  # reported only if the remote has no model either
            why = NotFetchedError(Fetched.failed(error))
        if found and described(local, found.manifest) and local_weights(local, found):
            unasked = _unasked(identity, min(OUTAGE_S, (until - time.monotonic()) / 2))
            if unasked:
                return replace(found, unasked=unasked)
        if remote is not None and (found is None or not _is_of(found, identity)):
            found, envelope = transfer.offered(remote) or (None, None)
        if found is None:
            where = (remote or local).location
            wanted = f"{factors['model.source']} for {factors['device.type']}, {factors['model.dtype']}"
            raise why or NotFetchedError(Fetched("miss", f"no prepared weights of {wanted} in {where}"))
        if not _is_of(found, identity):
            reason = "the published weights are of another revision; run snapcap build --weights again"
            raise NotFetchedError(Fetched("miss", reason))
        if described(local, found.manifest) is None:
            blobs = set(found.manifest.entries.values())
            transfer.bring(remote or local, blobs, blobs, partial(_place_small_file, local, found.manifest))
        if envelope is not None:
            local.keep(model_name(key), envelope)
    except Exception as error:
        raise NotFetchedError(Fetched.failed(error)) from error
    else:
        return found


@dataclass(frozen=True)
class Described:
    """Holds a published model. ``folder`` has its small files, like a checkpoint's folder."""

    found: Found
    folder: Path


def local_model(local: FolderStore, key: str, trust: Trust) -> Described | None:
    """Returns a model in the folder, built or fetched there; None if its manifest or one of its small files is
    missing. Raises ManifestError if the manifest is damaged, or no trusted key has signed it, and StoreError if the
    manifest cannot be read."""
    found = _Transfer(local, model_name(key), key, trust, 0.0).local_manifest()
    folder = None if found is None else described(local, found.manifest)
    return None if found is None or folder is None else Described(found, folder)


def described(local: FolderStore, manifest: Manifest) -> Path | None:
    """Returns the folder of a model's small files, all verified; None if a file is missing or damaged."""
    folder = _files_folder(local, manifest)
    try:
        for name, blob in manifest.entries.items():
            VerifiedFile(folder / name, blob).read()
    except OSError:
        return None
    return folder


def local_weights(local: FolderStore, found: Found) -> str | None:
    """Returns the name of the weights' file in the folder: fetched weights, whose every byte was verified, or
    weights that the folder's owner published there. Returns None without such a file."""
    weights = found.weights
    names = [f"{WEIGHTS}/{fetched_name(weights.content)}", *([blob_name(weights.file)] if found.vouched else [])]
    return next((name for name in names if local.size(name) == weights.size), None)


@dataclass
class _Transfer:
    """Looks up the manifest of a key, and downloads its blobs to the local folder.

    name: the manifest's place in a store.
    until: the moment of ``time.monotonic()`` to give up downloads at.
    bytes_fetched: bytes downloaded so far."""

    local: FolderStore
    name: str
    key: str
    trust: Trust
    until: float
    bytes_fetched: int = 0

    def local_manifest(self) -> Found | None:
        """Returns the manifest in the local folder; None without one. Raises ManifestError, StoreError."""
        stored = self.local.read(self.name, MAX_ENVELOPE_BYTES)
        if stored is None:
            return None
        vouched = self.trust.owner_suffices or self.local.is_vouched(stored.data)
        trust = self.trust.of_owner if vouched else self.trust
        return Found(open_envelope(stored.data, trust, self.key), vouched)

    def offered(self, remote: ArtifactStore) -> tuple[Found, bytes] | None:
        """Returns the manifest in the remote store and its envelope; None without one. The caller writes the
        envelope to the local folder when all blobs are there. Raises ManifestError, StoreError."""
        stored = remote.read(self.name, MAX_ENVELOPE_BYTES)
        if stored is None:
            return None
        return Found(open_envelope(stored.data, self.trust, self.key), self.trust.owner_suffices), stored.data

    def bring(
        self,
        source: ArtifactStore,
        blobs: Collection[Blob],
        missing: Collection[Blob],
        place: Callable[[Path, Blob], bool],
    ) -> None:
        """Downloads the missing blobs of a manifest to the local folder. Raises DamagedError if a blob is missing
        in the source, or its content differs from the manifest's digest, and StoreError if the source cannot be
        read, or the folder cannot be written.

        Args:
            blobs: all blobs of the manifest.
            place: stores a downloaded file, and returns False if its content is not that of the blob.
        """
        with self.local.scratch() as folder:
            for blob, path in download_blobs(source, blobs, missing, folder, self.until):
                self.bytes_fetched += blob.size
                if not place(path, blob):
                    where = f"{source.location}/{blob_name(blob)}"
                    raise DamagedError(f"{where} is damaged: its content is not that of its name")


def _set_of_folder(transfer: _Transfer, factors: Factors) -> Fetched:
    """Returns the set from the local folder. A damaged manifest is removed, so that the set can be made again. A
    manifest that no trusted key has signed stays until it is replaced: another server may trust its key."""
    local = transfer.local
    try:
        found = transfer.local_manifest()
        if found is None:
            return _missing(transfer, factors, (local, OWNER))
        return _hit(local, found.manifest, f"found in {local.location}")
    except UntrustedError as error:
        raise UntrustedError(f"{error}; the manifest is in {local.location}") from None
    except (ManifestError, DamagedError):
        local.delete(transfer.name)
        raise


def _set_of_remote(transfer: _Transfer, factors: Factors, remote: ArtifactStore) -> Fetched:
    """Fetches the set from the remote store into the local folder, and returns it."""
    local, offered = transfer.local, transfer.offered(remote)
    if offered is None:
        return _missing(transfer, factors, (remote, transfer.trust), (local, OWNER))
    found, envelope = offered
    blobs = set(found.manifest.entries.values())
    missing = {blob for blob in blobs if local.verified(blob) is None}
    transfer.bring(remote, blobs, missing, local.adopt)
    local.keep(transfer.name, envelope)
    return _hit(local, found.manifest, f"fetched from {remote.location}")


def _hit(local: FolderStore, manifest: Manifest, reason: str) -> Fetched:
    entries: dict[str, VerifiedFile] = {}
    for name, blob in manifest.entries.items():
        path = local.verified(blob)
        if path is None:
            raise DamagedError(f"{name} is missing or damaged in {local.location}")
        entries[name] = VerifiedFile(path, blob)
    return Fetched("hit", reason, entries, manifest=manifest)


def _missing(transfer: _Transfer, factors: Factors, *stores: tuple[ArtifactStore, Trust]) -> Fetched:
    """Returns a miss, or stale if the nearest manifest differs only in software, with the differences."""
    key, where = transfer.key, stores[0][0].location
    candidates = [manifest for store, trust in stores for manifest in _latest(store, trust, transfer.until)]
    found = nearest(factors, (one for one in candidates if one.kind == factors.get("kind", one.kind)))
    if found is None:
        return Fetched("miss", f"no artifacts for key {key[:12]} in {where}")
    manifest, differences = found
    shown = "; ".join(str(difference) for difference in differences[:3])
    more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
    return Fetched(
        "stale" if is_stale(differences) else "miss",
        f"no artifacts for key {key[:12]} in {where}; nearest, of {manifest.created}: {shown}{more}",
        differences=tuple(differences),
    )


def nearest(factors: Factors, manifests: Iterable[Manifest]) -> tuple[Manifest, list[Difference]] | None:
    """Returns the manifest with the fewest differing factors, the first of equals; None without manifests."""
    compared = [(manifest, differing(factors, manifest.factors)) for manifest in manifests]
    return min(compared, key=lambda pair: len(pair[1]), default=None)


def _latest(store: ArtifactStore, trust: Trust, until: float) -> list[Manifest]:
    """Returns the store's latest manifests of sets, to explain a miss. Unreadable manifests are left out."""
    manifests = []
    try:
        names = store.newest(MANIFESTS, _COMPARED)
    except StoreError as error:
        _log.debug("not compared: %s", error)
        return []
    for name in names:
        try:
            envelope = store.read(name, MAX_ENVELOPE_BYTES) if time.monotonic() < until else None
            if envelope is not None:
                manifests.append(open_envelope(envelope.data, trust))
        except (StoreError, ManifestError) as error:
            _log.debug("%s not compared: %s", name, error)
    return manifests


def _unasked(identity: "Future[Identity]", seconds: float) -> str:
    """Returns why the source's revision is not known after this many seconds; empty if it is known."""
    try:
        identity.result(max(0.0, seconds))
    except TimeoutError:
        return f"no answer within {seconds:.0f} s"
    except CheckpointError as error:
        return str(error)
    return ""


def _is_of(found: Found, identity: "Future[Identity]") -> bool:
    return dict(found.weights.identity) == dict(identity.result())


def _place_small_file(local: FolderStore, manifest: Manifest, path: Path, blob: Blob) -> bool:
    """Writes a downloaded small file of a model under each of its names. Returns False if it has other content."""
    try:
        data = VerifiedFile(path, blob).read()
    except ChangedError:
        return False
    for name in (name for name, each in manifest.entries.items() if each == blob):
        place = _files_folder(local, manifest) / name
        write_file(place, data, durable=False)  # verified whenever it is used
    return True


def _files_folder(local: FolderStore, manifest: Manifest) -> Path:
    """Returns the folder of a model's small files. A digest of their content is its name, so that no file is
    replaced while a process uses it."""
    listed = {name: blob.digest for name, blob in manifest.entries.items()}
    return local.path(f"{MODEL_FILES}/{hashlib.sha256(canonical_json(listed)).hexdigest()}")


def _attempt(look: Callable[..., Fetched], *arguments: object) -> Fetched:
    """Returns the result of a lookup, also if it fails: a start goes on without artifacts, whatever a store has."""
    try:
        return look(*arguments)
    except Exception as error:
        return Fetched.failed(error)
