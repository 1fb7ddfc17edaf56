"""Publishes artifact sets and models: blobs first, the manifest last, so that no set is ever incomplete."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import UserError
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import (
    CHUNK_BYTES,
    MAX_ENVELOPE_BYTES,
    Blob,
    Manifest,
    ManifestError,
    describe,
    open_envelope,
    seal,
)
from snapcap.warmup.artifacts.packs import upload_blobs
from snapcap.warmup.artifacts.signing import Signer, Trust
from snapcap.warmup.artifacts.store import ArtifactStore, StoreDeniedError, blob_name, manifest_name, model_name
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.files import open_regular


@dataclass(frozen=True)
class Published:
    """Holds the result of publishing; ``exists``: the store has the same artifacts already."""

    result: Literal["published", "exists", "denied", "error"]
    reason: str

    @property
    def done(self) -> bool:
        """True if the store has the artifacts now."""
        return self.result in ("published", "exists")


@dataclass(frozen=True)
class ModelFiles:
    """Holds a model's manifest and its files: the checkpoint's small files by name, and the prepared weights."""

    manifest: Manifest
    files: Mapping[str, Path]
    weights: Path


def publish(
    store: ArtifactStore,
    manifest: Manifest,
    files: Mapping[str, Path],
    signer: Signer | None,
    *,
    replace: bool = False,
    vouch: bool = False,
) -> Published:
    """Write an artifact set to a store.

    Args:
        files: the file of each entry of the manifest.
        signer: None publishes an unsigned set, which only the folder's owner accepts.
        replace: replace an existing set of this key, for example because it is corrupt or untrusted.
        vouch: note in a folder store that its owner built the set there.
    """
    try:
        name, envelope = manifest_name(manifest.key), seal(manifest, signer)
        if not replace and store.size(name) is not None:
            return _exists(store, manifest)
        conditional = store.is_conditional() and not replace
        _write_blobs(store, manifest, files, envelope if vouch else None, replace=replace)
        if store.write(name, envelope, if_absent=conditional) is None:
            return _exists(store, manifest)
    except Exception as error:
        return _failed(error)
    return Published("published", f"key {manifest.key[:12]} in {store.location}, {manifest.total_bytes} bytes")


def publish_model(store: ArtifactStore, model: ModelFiles, signer: Signer | None, trust: Trust) -> Published:
    """Write a model to a store. The key names the model's source without its revision, so a new revision replaces
    the old one. A remote store keeps an equal model that ``trust`` accepts. A folder store is always written again,
    which costs only a link, repairs damage, and notes that the folder's owner built it."""
    manifest = model.manifest
    size = f"{manifest.model_weights.size / (1 << 20):.1f} MiB"
    try:
        envelope = seal(manifest, signer)
        if store.is_remote and _has_model(store, manifest, trust):
            return Published("exists", f"{size} are in {store.location} already")
        _write_blobs(store, manifest, model.files, envelope, replace=not store.is_remote)
        _write_weights(store, model)
        store.write(model_name(manifest.key), envelope)
    except Exception as error:
        return _failed(error)
    return Published("published", f"{size} and {len(manifest.entries)} small files in {store.location}")


def digests(path: Path) -> tuple[Blob, tuple[str, ...]]:
    """Returns the SHA-256 and size of a file and the SHA-256 of each chunk. Reads it once. Raises OSError."""
    whole, chunks = hashlib.sha256(), list[str]()
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            whole.update(chunk)
            chunks.append(hashlib.sha256(chunk).hexdigest())
        return Blob(whole.hexdigest(), file.tell()), tuple(chunks)


def _write_blobs(
    store: ArtifactStore, manifest: Manifest, files: Mapping[str, Path], vouched: bytes | None, *, replace: bool
) -> None:
    """Writes the entries of a manifest. ``vouched``: the envelope that the folder's owner built. The note about it
    is written first, so that the folder never has such a manifest without its note. ``replace``: write also blobs
    that the store has with the right size."""
    if vouched is not None and isinstance(store, FolderStore):
        store.vouch(vouched)
    for name, blob in manifest.entries.items():
        if name not in files or describe(files[name]) != blob:
            raise ManifestError(f"the file of {name} has changed since the manifest was made; build again")
    upload_blobs(store, {blob: files[name] for name, blob in manifest.entries.items()}, replace)


def _write_weights(store: ArtifactStore, model: ModelFiles) -> None:
    blob = model.manifest.model_weights.file
    if isinstance(store, FolderStore) and store.root == model.weights.parent.parent:
        store.link(model.weights, blob)  # again, because an existing blob is not checked for damage
    elif not store.is_remote or store.size(blob_name(blob)) != blob.size:
        store.upload(blob_name(blob), model.weights)


def _has_model(store: ArtifactStore, manifest: Manifest, trust: Trust) -> bool:
    stored = store.read(model_name(manifest.key), MAX_ENVELOPE_BYTES)
    if stored is None:
        return False
    try:
        theirs = open_envelope(stored.data, trust, manifest.key)
    except ManifestError:
        return False
    if replace(theirs, created=manifest.created, builder=manifest.builder) != manifest:
        return False
    blobs = (manifest.model_weights.file, *manifest.entries.values())
    return all(store.size(blob_name(blob)) == blob.size for blob in blobs)


def _exists(store: ArtifactStore, manifest: Manifest) -> Published:
    return Published("exists", f"{store.location} has artifacts for key {manifest.key[:12]} already")


def _failed(error: Exception) -> Published:
    """Maps an error of publishing to its result. Raises any error that is a bug of snapcap."""
    match error:
        case StoreDeniedError():
            return Published("denied", str(error))
        case UserError() | ManifestError():
            return Published("error", str(error))
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return Published("error", f"{where}{os_error_text(error)}")
    raise error
