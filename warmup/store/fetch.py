"""Fetches an artifact set: verified files in the local folder, or the reason why there are none.

    local folder ─ built there, or signature ─ digests ──────────────────▶ hit
         └─ not so ─ remote manifest ─ signature ─ missing blobs ─ digests ─ local folder ─▶ hit

With trusted keys, and unsigned sets not allowed, a set is used only if one of these keys has signed it, which each
start looks at wherever it lies; or if it was built in the local folder, whose owner vouches for it there.

Nothing that is found in a store can raise here: each failure is a result with a reason.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Literal

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.envelope import MAX_ENVELOPE_BYTES, ManifestError, UntrustedError
from snapcap.warmup.artifacts.factors import is_stale
from snapcap.warmup.artifacts.key import Difference, Factors, nearest
from snapcap.warmup.artifacts.manifest import Manifest, open_envelope
from snapcap.warmup.artifacts.signing import OWNER, Trust
from snapcap.warmup.machine.worker import within
from snapcap.warmup.store.blobs import VerifiedFile
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.packs import bring_blobs
from snapcap.warmup.store.store import (
    MANIFESTS,
    ArtifactStore,
    DamagedError,
    StoreError,
    blob_name,
    manifest_name,
)

Result = Literal["hit", "miss", "stale", "corrupt", "untrusted", "error"]

_COMPARED = 16  # the latest manifests of a store, which a miss is explained by

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """Holds the result of a fetch.

    reason: a line that explains the result, with advice where the user can act.
    entries: on a hit, the verified local files by the manifest's entry names; else empty.
    bytes_fetched: bytes downloaded, whatever the result. seconds: duration of the whole fetch.
    differences: on a miss or stale, the factors in which the nearest manifest differs.
    """

    result: Result
    reason: str
    entries: Mapping[str, VerifiedFile] = field(default_factory=dict)
    bytes_fetched: int = 0
    seconds: float = 0.0
    manifest: Manifest | None = None
    differences: tuple[Difference, ...] = ()

    @property
    def unusable(self) -> bool:
        """There is a set of this key, and nobody will ever load it: a new one must take its place."""
        return self.result in ("corrupt", "untrusted")

    @property
    def in_the_way(self) -> bool:
        """There may be a set of this key in the local folder, and what is made here must take its place: it lacked
        something, or it cannot be used, which an error of the remote may have hidden."""
        return self.result not in ("miss", "stale")


class _FailedError(Exception):
    """A fetch that ends in anything but a hit."""

    def __init__(self, result: Result, reason: str, differences: Iterable[Difference] = ()) -> None:
        super().__init__(reason)
        self.result = result
        self.differences = tuple(differences)


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
    transfer = _Transfer(local, key, factors, trust, started + deadline)
    found = _labelled(transfer.from_folder)
    if found.result != "hit" and remote is not None:
        at_hand = found
        found = _within(deadline, lambda: _labelled(lambda: transfer.from_remote(remote)))
        if at_hand.in_the_way and not found.in_the_way:
            found = at_hand
        elif at_hand.in_the_way and found.result == "error":
            found = replace(found, reason=f"{found.reason}; and {at_hand.reason}")
    return replace(found, seconds=time.monotonic() - started, bytes_fetched=transfer.bytes_fetched)


@dataclass
class _Transfer:
    """Runs a fetch and counts the bytes that it has downloaded."""

    local: FolderStore
    key: str
    factors: Factors
    trust: Trust
    until: float
    bytes_fetched: int = 0

    def from_folder(self) -> Fetched:
        """Returns the set from the local folder. A damaged manifest is removed, so that the set can be made again.
        A manifest that no trusted key has signed stays until it is replaced: another server may trust its key."""
        name = manifest_name(self.key)
        try:
            envelope = self.local.read(name, MAX_ENVELOPE_BYTES)
            if envelope is None:
                raise self._missing((self.local, OWNER))
            manifest = self._opened(envelope.data, self._trust_here(envelope.data))
            return self._hit(manifest, f"found in {self.local.location}")
        except UntrustedError as error:
            raise UntrustedError(f"{error}; it lies in {self.local.location}") from None
        except (ManifestError, DamagedError):
            self.local.delete(name)
            raise

    def from_remote(self, remote: ArtifactStore) -> Fetched:
        """The set of the remote, brought to the folder."""
        name = manifest_name(self.key)
        envelope = remote.read(name, MAX_ENVELOPE_BYTES)
        if envelope is None:
            raise self._missing((remote, self.trust), (self.local, OWNER))
        manifest = self._opened(envelope.data, self.trust)
        self._download(remote, manifest)
        self.local.keep(name, envelope.data)
        return self._hit(manifest, f"fetched from {remote.location}")

    def _trust_here(self, envelope: bytes) -> Trust:
        """Whom to trust with an envelope of the folder."""
        vouched = self.trust.owner_suffices or self.local.is_vouched(envelope)
        return self.trust.of_owner if vouched else self.trust

    def _opened(self, data: bytes, trust: Trust) -> Manifest:
        manifest = open_envelope(data, trust)
        if manifest.key != self.key:  # signed, but for something else
            raise ManifestError(f"the manifest under key {self.key[:12]} is that of key {manifest.key[:12]}")
        return manifest

    def _hit(self, manifest: Manifest, reason: str) -> Fetched:
        entries: dict[str, VerifiedFile] = {}
        for name, blob in manifest.entries.items():
            path = self.local.verified(blob)
            if path is None:
                raise DamagedError(f"{name} is missing or damaged in {self.local.location}")
            entries[name] = VerifiedFile(path, blob)
        return Fetched("hit", reason, entries, manifest=manifest)

    def _download(self, remote: ArtifactStore, manifest: Manifest) -> None:
        """Every blob that is not at hand becomes part of the folder, if it is what the manifest says."""
        blobs = set(manifest.entries.values())
        missing = {blob for blob in blobs if self.local.verified(blob) is None}
        with self.local.scratch() as folder:
            for blob, path in bring_blobs(remote, blobs, missing, folder, self.until):
                self.bytes_fetched += blob.size
                if not self.local.adopt(path, blob):
                    where = f"{remote.location}/{blob_name(blob)}"
                    raise DamagedError(f"{where} is damaged: its content is not that of its name")

    def _missing(self, *stores: tuple[ArtifactStore, Trust]) -> _FailedError:
        """Why there is no manifest: nothing comes near, or something does that other software made."""
        where = stores[0][0].location
        candidates = [manifest for store, trust in stores for manifest in self._latest(store, trust)]
        found = nearest(self.factors, (one for one in candidates if one.kind == self.factors.get("kind", one.kind)))
        if found is None:
            return _FailedError("miss", f"no artifacts for key {self.key[:12]} in {where}")
        manifest, differences = found
        shown = "; ".join(str(difference) for difference in differences[:3])
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        return _FailedError(
            "stale" if is_stale(differences) else "miss",
            f"no artifacts for key {self.key[:12]} in {where}; nearest, of {manifest.created}: {shown}{more}",
            differences,
        )

    def _latest(self, store: ArtifactStore, trust: Trust) -> list[Manifest]:
        """The store's latest manifests, less those that cannot be read: they only explain."""
        manifests = []
        try:
            names = store.newest(MANIFESTS, _COMPARED)
        except StoreError as error:
            _log.debug("not compared: %s", error)
            return []
        for name in names:
            try:
                envelope = store.read(name, MAX_ENVELOPE_BYTES) if time.monotonic() < self.until else None
                if envelope is not None:
                    manifests.append(open_envelope(envelope.data, trust))
            except (StoreError, ManifestError) as error:
                _log.debug("%s not compared: %s", name, error)
        return manifests


def _labelled(work: Callable[[], Fetched]) -> Fetched:
    try:
        return work()
    except _FailedError as failed:
        return Fetched(failed.result, str(failed), differences=failed.differences)
    except UntrustedError as error:
        return Fetched("untrusted", str(error))
    except (ManifestError, DamagedError) as error:
        return Fetched("corrupt", str(error))
    except StoreError as error:
        return Fetched("error", str(error))
    except Exception as error:  # whatever a store can hold or do: a start must go on without artifacts
        _log.exception("fetching artifacts failed in an unexpected way")
        return Fetched("error", f"unexpected: {type(error).__name__}: {error}")


def _within(seconds: float, work: Callable[[], Fetched]) -> Fetched:
    """The result of work that raises nothing, or what is to be told when the time is over."""
    try:
        return within(seconds, work, "artifacts")
    except TimeoutError:
        return Fetched(
            "error", f"the artifact store did not answer within {seconds:g} s; check endpoint and network"
        )
