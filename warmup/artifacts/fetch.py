"""Fetches artifacts: verified files in the local folder, or the reason why there are none.

    local folder ─ built there, or signature ─ digests ──────────────────▶ hit
         └─ not so ─ remote manifest ─ signature ─ missing blobs ─ digests ─ local folder ─▶ hit

An artifact set becomes blobs of the folder. A model becomes a folder of small files, as a checkpoint's without its
weights, and must be of the revision that its source has now; its weights come by chunks (``artifacts.download``).

With trusted keys, and unsigned artifacts not allowed, a manifest is used only if one of these keys has signed it,
which each start looks at wherever the manifest lies; or if it was made in the local folder, whose owner vouches for
it there.

Nothing that is found in a store can fail a start: each failure is a result with a reason, of the one table that
``NotFetchedError.of`` is.
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
from snapcap.warmup.artifacts.packs import bring_blobs
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
# Advice about results whose reasons have none.
_BUILD = "run `snapcap build` with the same options"
_REMEDIES: Mapping[Result, str] = {
    "miss": _BUILD,
    "stale": _BUILD,
    "corrupt": f"{_BUILD}, which publishes them again",
    "untrusted": f"name the key that signed them with --trusted-key, or {_BUILD} and --sign-key",
}

_COMPARED = 16  # the latest manifests of a store, which a miss is explained by

_log = logging.getLogger(__name__)


class NotFetchedError(Exception):
    """Artifacts were not fetched.

    result: the kind of failure, never "hit". reason: explains the failure in a line.
    differences: on a miss or stale, the factors in which the nearest manifest differs.
    """

    def __init__(self, result: Result, reason: str, differences: Iterable[Difference] = ()) -> None:
        super().__init__(reason)
        self.result: Result = result
        self.reason = reason
        self.differences = tuple(differences)

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
            case UserError() | KeyFileError():
                return cls("error", str(error))
        _log.error("fetching artifacts failed in an unexpected way", exc_info=error)
        return cls("error", f"unexpected: {type(error).__name__}: {first_line(error)}")


@dataclass(frozen=True)
class Fetched:
    """Holds the result of a fetch.

    reason: a line that explains the result, with advice where the user can act.
    entries: on a hit of a set, the verified local files by the manifest's entry names; else empty.
    bytes_fetched: bytes downloaded, whatever the result. seconds: duration of the whole fetch.
    differences: on a miss or stale, the factors in which the nearest manifest differs.
    unasked: why the source of a model was not asked for its revision, where it could not be; else empty.
    """

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
        """The result of a fetch that an error has ended."""
        failure = NotFetchedError.of(error)
        return cls(failure.result, failure.reason, differences=failure.differences)

    @property
    def unusable(self) -> bool:
        """There is a set of this key, and nobody will ever load it: a new one must take its place."""
        return self.result in ("corrupt", "untrusted")

    @property
    def in_the_way(self) -> bool:
        """There may be a set of this key in the local folder, and what is made here must take its place: it lacked
        something, or it cannot be used, which an error of the remote may have hidden."""
        return self.result not in ("miss", "stale")

    @property
    def remedy(self) -> str:
        """Advice to the operator about the result; empty on a hit, and where `reason` has some."""
        return _REMEDIES.get(self.result, "")


@dataclass(frozen=True)
class Artifacts:
    """Holds the key that a start looked for, and the result."""

    key: str
    factors: Factors
    fetched: Fetched

    @property
    def hit(self) -> bool:
        return self.fetched.result == "hit"

    @property
    def input_specs(self) -> Mapping[str, Any]:
        """By entry, what its package was built for; empty without a set."""
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
    """A verified manifest; ``vouched``: the folder's owner built it there, or vouches for all that is there.

    unasked: why the source was not asked for its revision, where it could not be; else empty.
    """

    manifest: Manifest
    vouched: bool
    unasked: str = ""

    @property
    def weights(self) -> Weights:
        """The description of a model's weights."""
        return self.manifest.model_weights


def fetch(
    remote: ArtifactStore | None, local: FolderStore, key: str, factors: Factors, trust: Trust, deadline: float
) -> Fetched:
    """Bring the artifact set of a key to the local folder, and verify every byte of it.

    Args:
        local: looked into first.
        key: ``artifact_key(factors)``.
        trust: whose signatures are accepted. Without keys, everything in ``local``, as only its owner writes there.
        deadline: seconds that the remote may take, even one that never answers.
    """
    started = time.monotonic()
    transfer = _Transfer(local, manifest_name(key), key, trust, started + deadline)
    found = _labelled(lambda: _set_of_folder(transfer, factors))
    if found.result != "hit" and remote is not None:
        at_hand = found
        try:
            found = within(
                deadline, lambda: _labelled(lambda: _set_of_remote(transfer, factors, remote)), "artifacts"
            )
        except TimeoutError:
            found = Fetched(
                "error", f"the artifact store did not answer within {deadline:g} s; check endpoint and network"
            )
        if at_hand.in_the_way and not found.in_the_way:
            found = at_hand
        elif at_hand.in_the_way and found.result == "error":
            found = replace(found, reason=f"{found.reason}; and {at_hand.reason}")
    return replace(found, seconds=time.monotonic() - started, bytes_fetched=transfer.bytes_fetched)


def fetch_model(
    remote: ArtifactStore | None,
    local: FolderStore,
    factors: Factors,
    trust: Trust,
    identify: Callable[[], Identity],
    until: float,
) -> Found:
    """Bring the manifest and the small files of a published model to the folder. Where the source does not say its
    revision within ``OUTAGE_S``, a model that is in the folder as a whole is used as it is.

    Args:
        remote: None where the folder is the store.
        factors: ``weights.find.model_factors``.
        identify: asks the source for its revision.
        until: the moment of ``time.monotonic()`` to give up downloads at.

    Raises:
        NotFetchedError: there is none that may be used.
    """
    try:
        key = artifact_key(factors)
        transfer = _Transfer(local, model_name(key), key, trust, until)
        identity = begin(identify, "snapcap-source")  # two answers for the time of one
        found, why, envelope = None, None, None
        try:
            found = transfer.at_hand()
        except (ManifestError, StoreError) as error:  # reported only if the remote has no model either
            why = NotFetchedError.of(error)
        if found and described(local, found.manifest) and weights_at_hand(local, found):
            unasked = _unasked(identity, min(OUTAGE_S, (until - time.monotonic()) / 2))
            if unasked:
                return replace(found, unasked=unasked)
        if remote is not None and (found is None or not _is_of(found, identity)):
            found, envelope = transfer.offered(remote) or (None, None)
        if found is None:
            where = (remote or local).location
            wanted = f"{factors['model.source']} for {factors['device.type']}, {factors['model.dtype']}"
            raise why or NotFetchedError("miss", f"no prepared weights of {wanted} in {where}")
        if not _is_of(found, identity):
            raise NotFetchedError(
                "miss", "the published weights are of another revision; run snapcap build --weights again"
            )
        if described(local, found.manifest) is None:
            blobs = set(found.manifest.entries.values())
            transfer.bring(remote or local, blobs, blobs, partial(_place_small_file, local, found.manifest))
        if envelope is not None:
            local.keep(model_name(key), envelope)
    except Exception as error:
        raise NotFetchedError.of(error) from error
    else:
        return found


def local_model(local: FolderStore, key: str, trust: Trust) -> Found | None:
    """The manifest of a model in the folder, which was built there or brought there; None without one.

    Raises:
        ManifestError: it is damaged, or nobody trusted has signed it.
        StoreError: it cannot be read.
    """
    return _Transfer(local, model_name(key), key, trust, 0.0).at_hand()


def described(local: FolderStore, manifest: Manifest) -> Path | None:
    """The folder of a model's small files, all of them verified; None where one is missing or not as it should
    be."""
    folder = _files_folder(local, manifest)
    try:
        for name, blob in manifest.entries.items():
            VerifiedFile(folder / name, blob).read()
    except OSError:
        return None
    return folder


def weights_at_hand(local: FolderStore, found: Found) -> str | None:
    """The name of the weights' file in the folder, if it is there: as it was fetched, every byte verified; or as
    its owner has published it there."""
    weights = found.weights
    names = [f"{WEIGHTS}/{fetched_name(weights.content)}", *([blob_name(weights.file)] if found.vouched else [])]
    return next((name for name in names if local.size(name) == weights.size), None)


@dataclass
class _Transfer:
    """Looks for the manifest of a key, and brings its blobs to the local folder.

    name: the manifest's place in a store.
    until: the moment of ``time.monotonic()`` to give up downloads at.
    bytes_fetched: bytes downloaded so far.
    """

    local: FolderStore
    name: str
    key: str
    trust: Trust
    until: float
    bytes_fetched: int = 0

    def at_hand(self) -> Found | None:
        """The manifest in the folder; None without one. Raises ManifestError, StoreError."""
        stored = self.local.read(self.name, MAX_ENVELOPE_BYTES)
        if stored is None:
            return None
        vouched = self.trust.owner_suffices or self.local.is_vouched(stored.data)
        trust = self.trust.of_owner if vouched else self.trust
        return Found(open_envelope(stored.data, trust, self.key), vouched)

    def offered(self, remote: ArtifactStore) -> tuple[Found, bytes] | None:
        """The manifest in the remote store, with its envelope, which the caller keeps in the folder when all blobs
        are there; None without one. Raises ManifestError, StoreError."""
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
        """Bring missing blobs of a manifest to the folder.

        Args:
            blobs: all of the manifest.
            place: takes a downloaded file, and returns False if the file is not that blob.

        Raises:
            DamagedError: a blob is missing in the source, or is not what the manifest says.
            StoreError: the source cannot be read, or the folder not be written.
        """
        with self.local.scratch() as folder:
            for blob, path in bring_blobs(source, blobs, missing, folder, self.until):
                self.bytes_fetched += blob.size
                if not place(path, blob):
                    where = f"{source.location}/{blob_name(blob)}"
                    raise DamagedError(f"{where} is damaged: its content is not that of its name")


def _set_of_folder(transfer: _Transfer, factors: Factors) -> Fetched:
    """Returns the set from the local folder. A damaged manifest is removed, so that the set can be made again. A
    manifest that no trusted key has signed stays until it is replaced: another server may trust its key."""
    local = transfer.local
    try:
        found = transfer.at_hand()
        if found is None:
            raise _missing(transfer, factors, (local, OWNER))
        return _hit(local, found.manifest, f"found in {local.location}")
    except UntrustedError as error:
        raise UntrustedError(f"{error}; it lies in {local.location}") from None
    except (ManifestError, DamagedError):
        local.delete(transfer.name)
        raise


def _set_of_remote(transfer: _Transfer, factors: Factors, remote: ArtifactStore) -> Fetched:
    """Returns the set of the remote store, brought to the folder."""
    local, offered = transfer.local, transfer.offered(remote)
    if offered is None:
        raise _missing(transfer, factors, (remote, transfer.trust), (local, OWNER))
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


def _missing(transfer: _Transfer, factors: Factors, *stores: tuple[ArtifactStore, Trust]) -> NotFetchedError:
    """Explains why there is no manifest of a set: nothing comes near, or other software made what does."""
    key, where = transfer.key, stores[0][0].location
    candidates = [manifest for store, trust in stores for manifest in _latest(store, trust, transfer.until)]
    found = nearest(factors, (one for one in candidates if one.kind == factors.get("kind", one.kind)))
    if found is None:
        return NotFetchedError("miss", f"no artifacts for key {key[:12]} in {where}")
    manifest, differences = found
    shown = "; ".join(str(difference) for difference in differences[:3])
    more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
    return NotFetchedError(
        "stale" if is_stale(differences) else "miss",
        f"no artifacts for key {key[:12]} in {where}; nearest, of {manifest.created}: {shown}{more}",
        differences,
    )


def nearest(factors: Factors, manifests: Iterable[Manifest]) -> tuple[Manifest, list[Difference]] | None:
    """Returns the manifest with the fewest differing factors, the first of equals; None without manifests."""
    compared = [(manifest, differing(factors, manifest.factors)) for manifest in manifests]
    return min(compared, key=lambda pair: len(pair[1]), default=None)


def _latest(store: ArtifactStore, trust: Trust, until: float) -> list[Manifest]:
    """The store's latest manifests of sets, less those that cannot be read: they only explain."""
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
    """Why the source does not say its revision within so many seconds; empty if it does."""
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
    """Named by what is in it: a file is never replaced by another while somebody uses it."""
    listed = {name: blob.digest for name, blob in manifest.entries.items()}
    return local.path(f"{MODEL_FILES}/{hashlib.sha256(canonical_json(listed)).hexdigest()}")


def _labelled(work: Callable[[], Fetched]) -> Fetched:
    try:
        return work()
    except Exception as error:  # whatever a store can hold or do: a start must go on without artifacts
        return Fetched.failed(error)
