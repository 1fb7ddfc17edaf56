"""Publishes the results of a build to the local folder, and to S3 if it is writable and the set is signed."""

import logging
from collections.abc import Mapping
from pathlib import Path

from snapcap.models.errors import UserError
from snapcap.warmup.artifacts.fetch import Fetched
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import Factors
from snapcap.warmup.artifacts.manifest import MAX_ENVELOPE_BYTES, Manifest, Weights, describe_all, new_manifest
from snapcap.warmup.artifacts.publish import ModelFiles, Published, digests, publish, publish_model
from snapcap.warmup.artifacts.remote import open_store, trust_of
from snapcap.warmup.artifacts.signing import KeyFileError, Signer, load_signer
from snapcap.warmup.artifacts.store import WEIGHTS, StoreError, manifest_name
from snapcap.warmup.build.builder import Built
from snapcap.warmup.checkpoints.local import metadata_among
from snapcap.warmup.checkpoints.source import downloaded_identity, is_publishable
from snapcap.warmup.errors import StartError, one_line
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.weights.find import content_digest, identify, model_factors, prepared_name, recorded_digest

_logger = logging.getLogger("snapcap.build")


def check_publishing(options: StartOptions) -> None:
    """Check before minutes of compiling that `snapcap build` can publish. Raises StartError if the signing key is
    unusable or a remote store needs one, or if the weights cannot be published."""
    signer_of(options)
    store, source = options.store, options.model.source
    if store.remote is not None and store.sign_key is None and not store.allow_unsigned:
        raise StartError(
            f"artifacts for {store.remote} must be signed: make a key with `snapcap keygen KEY` and pass "
            "--sign-key KEY, or pass --allow-unsigned here and to every server"
        )
    if store.weights and not options.model.prepared_weights:
        raise StartError("--weights publishes prepared weights: remove --no-prepared-weights")
    if store.weights and not is_publishable(source):
        raise StartError(
            f"--weights needs a model that every machine finds by its name, but {source!r} is a folder on this "
            "machine: upload it to S3 and pass --model s3://bucket/prefix, or owner/name of the hub"
        )


def signer_of(options: StartOptions) -> Signer | None:
    """Returns the key for signing, or None. Raises StartError if the file is not a private key."""
    if options.store.sign_key is None:
        return None
    try:
        return load_signer(options.store.sign_key)
    except KeyFileError as error:
        raise StartError(str(error)) from None


def publish_built(
    built: Built, factors: Factors, options: StartOptions, to_remote: bool, found: Fetched
) -> list[Published]:
    """Publish a complete aot set to the local folder, and to the remote store if there is one and ``to_remote``.
    Returns the results in this order. An existing set of the same key stays, unless ``found`` says that it is
    unusable. Raises StoreError if a store cannot be opened as configured, and OSError if a built file cannot be
    read.

    Args:
        found: the earlier lookup of the set. After a hit, ``built`` has this set, and the owner does not vouch for
            it.
    """
    entries = {**built.files, **built.libraries}
    files = {name: file.path for name, file in entries.items()}
    blobs = {name: file.blob for name, file in entries.items()}  # digests of the checked files
    metadata = {"signatures": dict(built.input_specs)}
    manifest = new_manifest("aot", factors, blobs, metadata)
    if found.result == "hit":
        local = Published("exists", found.reason)
    else:
        local = _publish_locally(manifest, files, options, found)
    if not to_remote or options.store.remote is None:
        return [local]
    store = open_store(options.store.remote, options.s3, trust_of(options.store))
    return [local, publish(store, manifest, files, signer_of(options), replace=found.unusable)]


def _publish_locally(
    manifest: Manifest, files: Mapping[str, Path], options: StartOptions, found: Fetched
) -> Published:
    """Publish to the local folder, and vouch there for a set that was built here. A set that was completed from
    another builder's set is not vouched for: it must not outlive the trust in that builder."""
    folder, signer, name = FolderStore.open(options.store_folder), signer_of(options), manifest_name(manifest.key)
    try:
        used = folder.read(name, MAX_ENVELOPE_BYTES) if found.result == "hit" else None
        own = used is None or folder.is_vouched(used.data)
        if not own and signer is None and not trust_of(options.store).owner_suffices:
            return Published("exists", f"{found.reason}; packages built here are not added without --sign-key")
    except StoreError as error:
        return Published("error", str(error))
    return publish(folder, manifest, files, signer, replace=found.in_the_way, vouch=own)


def publish_weights(checkpoint: Checkpoint, plan: Plan, options: StartOptions) -> Published:
    """Publish the local folder's prepared weights and the checkpoint's small files to the remote store, or to the
    local folder if it is the store."""
    try:
        local, trust = FolderStore.open(options.store_folder), trust_of(options.store)
        model = describe_model(options, checkpoint, plan, local)
        remote = options.store.remote
        store = local if remote is None else open_store(remote, options.s3, trust)
    except (UserError, OSError) as error:
        return Published("error", one_line(error))
    return publish_model(store, model, signer_of(options), trust)


def describe_model(options: StartOptions, checkpoint: Checkpoint, plan: Plan, local: FolderStore) -> ModelFiles:
    """Describe a checkpoint that was downloaded for ``options``, and whose weights are prepared in ``local``.
    Raises CheckpointError if the checkpoint's revision is unknown, and WeightsError, StoreError or OSError if its
    files cannot be read, or its weights are not prepared."""
    source, folder = options.model.source, checkpoint.folder
    before = identify(folder), downloaded_identity(source, folder)
    digest = recorded_digest(local, folder, identify(folder)) or content_digest(folder)
    path = local.path(f"{WEIGHTS}/{prepared_name(digest, checkpoint, plan)}")
    if not path.is_file():
        raise StoreError("the weights are not prepared")
    blob, chunks = digests(path)
    # Files in the hub's cache are links to its blobs.
    names = metadata_among(sorted(each.name for each in folder.iterdir() if each.is_file()))
    files = {name: (folder / name).resolve() for name in names}
    described = describe_all(files)
    if (identify(folder), downloaded_identity(source, folder)) != before:
        raise StoreError("the checkpoint was changed while it was read; run snapcap build --weights again")
    weights = Weights(blob, chunks, digest, before[1])
    manifest = new_manifest("model", model_factors(options), described, weights=weights)
    return ModelFiles(manifest, files, path)


def report(published: Published, status: StartupStatus) -> None:
    """Count and log the result of publishing in a server."""
    status.count("artifact_publish", published.result)
    level = logging.INFO if published.done else logging.ERROR
    _logger.log(level, "artifacts", extra={"fields": {"result": published.result, "reason": published.reason}})


def publish_jit(files: Mapping[str, Path], factors: Factors, options: StartOptions, found: Fetched) -> Published:
    """Publish a jit set to the local folder. Replaces the ``found`` set if it was incomplete or unusable. Raises
    StartError, StoreError and OSError as ``publish_built`` does."""
    manifest = new_manifest("jit", factors, describe_all(files))
    return _publish_locally(manifest, files, options, found)
