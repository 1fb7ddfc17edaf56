"""Publishes the prepared weights of a checkpoint, with its small files: blobs first, the signed manifest last."""

import dataclasses
import hashlib
from datetime import UTC, datetime
from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.envelope import MAX_ENVELOPE_BYTES, ManifestError
from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.artifacts.manifest import Blob
from snapcap.warmup.artifacts.model_manifest import CHUNK_BYTES, ModelManifest, open_model, seal_model
from snapcap.warmup.artifacts.signing import Signer, Trust
from snapcap.warmup.checkpoints.patterns import METADATA, CheckpointError, matching
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.files import open_regular
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.store.blobs import describe
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.packs import upload_blobs
from snapcap.warmup.store.publish import Published
from snapcap.warmup.store.store import (
    WEIGHTS,
    ArtifactStore,
    StoreDeniedError,
    StoreError,
    blob_name,
    model_name,
)
from snapcap.warmup.version import snapcap_version
from snapcap.warmup.weights.identity import content_digest, identify
from snapcap.warmup.weights.key import layout_digest, prepared_name
from snapcap.warmup.weights.published.source import downloaded_identity, model_factors_of
from snapcap.warmup.weights.records import recorded_digest

_READ_BYTES = 1024 * 1024


@dataclass(frozen=True)
class ModelFiles:
    """A manifest, and the files that it describes: the checkpoint's by name, and that of the prepared weights."""

    manifest: ModelManifest
    files: dict[str, Path]
    weights: Path


def describe_model(options: StartOptions, checkpoint: Checkpoint, plan: Plan, local: FolderStore) -> ModelFiles:
    """Describe a checkpoint that was downloaded for ``options``, and whose weights are prepared in ``local``.

    Raises:
        CheckpointError: nothing says which revision it is.
        WeightsError, StoreError, OSError: its files cannot be read, or its weights are not prepared.
    """
    source, folder = options.model.source, checkpoint.folder
    before = identify(folder), downloaded_identity(source, folder)
    digest = recorded_digest(local, folder, identify(folder)) or content_digest(folder)
    layout = layout_digest(checkpoint.config, checkpoint.transform)
    weights = local.path(f"{WEIGHTS}/{prepared_name(digest, plan.device_type, plan.dtype, layout)}")
    if not weights.is_file():
        raise StoreError("the weights are not prepared")
    blob, chunks = digests(weights)
    # A hub's files are links to where it keeps contents.
    names = matching(sorted(path.name for path in folder.iterdir() if path.is_file()), METADATA)
    files = {name: (folder / name).resolve() for name in names}
    described = {name: describe(path) for name, path in files.items()}
    if (identify(folder), downloaded_identity(source, folder)) != before:
        raise StoreError("the checkpoint was changed while it was read; run snapcap build --weights again")
    factors = model_factors_of(options)
    manifest = ModelManifest(
        key=artifact_key(factors),
        factors=factors,
        identity=before[1],
        checkpoint=digest,
        files=described,
        weights=blob,
        chunks=chunks,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        builder=snapcap_version(),
    )
    return ModelFiles(manifest, files, weights)


def publish_model(store: ArtifactStore, model: ModelFiles, signer: Signer | None, trust: Trust) -> Published:
    """Write a model to a store; what is there already, and would be accepted by ``trust``, stays."""
    manifest = model.manifest
    size = f"{manifest.weights.size / (1 << 20):.1f} MiB"
    try:
        envelope = seal_model(manifest, signer)
        if _is_there(store, manifest, trust):
            return Published("exists", f"{size} are in {store.location} already")
        files = {blob: model.files[name] for name, blob in manifest.files.items()}
        upload_blobs(store, files, replace=not store.is_remote)
        _write_weights(store, model)
        if isinstance(store, FolderStore):
            store.vouch(envelope)
        store.write(model_name(manifest.key), envelope)
    except StoreDeniedError as error:
        return Published("denied", str(error))
    except (StoreError, ManifestError, CheckpointError) as error:
        return Published("error", str(error))
    except OSError as error:
        return Published("error", f"{error.filename}: {os_error_text(error)}")
    return Published("published", f"{size} and {len(manifest.files)} small files in {store.location}")


def _write_weights(store: ArtifactStore, model: ModelFiles) -> None:
    blob = model.manifest.weights
    if isinstance(store, FolderStore):
        if store.root == model.weights.parent.parent:
            store.link(model.weights, blob)  # anew, as nobody looks for damage in what is there
        else:
            store.upload(blob_name(blob), model.weights)
    elif store.size(blob_name(blob)) != blob.size:
        store.upload(blob_name(blob), model.weights)


def _is_there(store: ArtifactStore, manifest: ModelManifest, trust: Trust) -> bool:
    if isinstance(store, FolderStore):
        return False  # written again: that costs a link, and mends what is damaged
    stored = store.read(model_name(manifest.key), MAX_ENVELOPE_BYTES)
    if stored is None:
        return False
    try:
        theirs = open_model(stored.data, manifest.key, trust)
    except ManifestError:
        return False
    if dataclasses.replace(theirs, created=manifest.created, builder=manifest.builder) != manifest:
        return False
    return all(store.size(blob_name(blob)) == blob.size for blob in (manifest.weights, *manifest.files.values()))


def digests(path: Path) -> tuple[Blob, tuple[str, ...]]:
    """SHA-256 and size of a whole file, and the SHA-256 of each of its chunks, read once. Raises OSError."""
    whole = hashlib.sha256()
    chunks: list[str] = []
    with open_regular(path) as file:
        while True:
            chunk, left = hashlib.sha256(), CHUNK_BYTES
            while left and (piece := file.read(min(left, _READ_BYTES))):
                whole.update(piece)
                chunk.update(piece)
                left -= len(piece)
            if left == CHUNK_BYTES:
                return Blob(whole.hexdigest(), file.tell()), tuple(chunks)
            chunks.append(chunk.hexdigest())
