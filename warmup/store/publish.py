"""Publishes an artifact set: blobs first, the manifest last, so that a set is never there in part."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.envelope import ManifestError
from snapcap.warmup.artifacts.key import Factors, artifact_key
from snapcap.warmup.artifacts.manifest import Manifest, seal
from snapcap.warmup.artifacts.signing import Signer
from snapcap.warmup.options import Kind
from snapcap.warmup.store.blobs import describe
from snapcap.warmup.store.packs import upload_blobs
from snapcap.warmup.store.store import ArtifactStore, StoreDeniedError, StoreError, manifest_name


@dataclass(frozen=True)
class Published:
    """Holds the result of publishing; ``exists``: the store has a valid set of the same key already."""

    result: Literal["published", "exists", "denied", "error"]
    reason: str

    @property
    def done(self) -> bool:
        """True if the store has a set of the key now."""
        return self.result in ("published", "exists")


def new_manifest(
    kind: Kind,
    factors: Factors,
    files: Mapping[str, Path],
    builder: str,
    metadata: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of files as they are now.

    Args:
        files: entry name to file.
        builder: the snapcap version.
        metadata: JSON for whoever loads the files.

    Raises:
        OSError: a file cannot be read.
    """
    return Manifest(
        key=artifact_key(factors),
        factors=dict(factors),
        kind=kind,
        entries={name: describe(path) for name, path in files.items()},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        builder=builder,
        metadata=dict(metadata or {}),
    )


def publish(
    store: ArtifactStore,
    manifest: Manifest,
    files: Mapping[str, Path],
    signer: Signer | None,
    replace: bool = False,
) -> Published:
    """Write an artifact set to a store.

    Args:
        files: the file of each entry of the manifest.
        signer: None leaves it unsigned, which only a folder's owner accepts.
        replace: also where there is a set of that key, because it was found corrupt, stale or untrusted.
    """
    try:
        envelope = seal(manifest, signer)
        if not replace and store.size(manifest_name(manifest.key)) is not None:
            return _exists(store, manifest)
        conditional = store.is_conditional() and not replace
        _upload(store, manifest, files, replace)
        if store.write(manifest_name(manifest.key), envelope, if_absent=conditional) is None:
            return _exists(store, manifest)
    except StoreDeniedError as error:
        return Published("denied", str(error))
    except (StoreError, ManifestError) as error:
        return Published("error", str(error))
    except OSError as error:
        return Published("error", f"{error.filename}: {error.strerror}")
    return Published("published", f"key {manifest.key[:12]} in {store.location}, {manifest.total_bytes} bytes")


def _upload(store: ArtifactStore, manifest: Manifest, files: Mapping[str, Path], replace: bool) -> None:
    for name, blob in manifest.entries.items():
        if name not in files or describe(files[name]) != blob:
            raise ManifestError(f"the file of {name} is not the one that the manifest was made of; build again")
    upload_blobs(store, {blob: files[name] for name, blob in manifest.entries.items()}, replace)


def _exists(store: ArtifactStore, manifest: Manifest) -> Published:
    return Published("exists", f"{store.location} has artifacts for key {manifest.key[:12]} already")
