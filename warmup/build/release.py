"""Publishes finished builds to artifact stores: the local folder, and S3 where it may be written and is signed."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from snapcap.models.errors import UserError
from snapcap.warmup.artifacts.envelope import MAX_ENVELOPE_BYTES
from snapcap.warmup.artifacts.key import Factors
from snapcap.warmup.artifacts.manifest import Manifest, seal
from snapcap.warmup.artifacts.signing import KeyFileError, Signer, load_signer
from snapcap.warmup.build.tasks import Built
from snapcap.warmup.errors import StartError, one_line
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import CPU_LIBRARY, Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.store.fetch import Fetched
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.open import open_store, trust_of
from snapcap.warmup.store.publish import Published, new_manifest, publish
from snapcap.warmup.store.store import StoreError, manifest_name
from snapcap.warmup.version import snapcap_version
from snapcap.warmup.weights.published.publish import describe_model, publish_model

_logger = logging.getLogger("snapcap.build")


class Publication(NamedTuple):
    """Holds the results of publishing to the local folder and to the remote store; ``remote`` is None if the set
    was not published there."""

    local: Published
    remote: Published | None


def signer_of(options: StartOptions) -> Signer | None:
    """The key that publications are signed with.

    Raises:
        StartError: the file is not a private key.
    """
    if options.store.sign_key is None:
        return None
    try:
        return load_signer(options.store.sign_key)
    except KeyFileError as error:
        raise StartError(str(error)) from None


def publish_built(
    built: Built, factors: Factors, options: StartOptions, to_remote: bool, found: Fetched
) -> Publication:
    """Publish a complete aot set. A set of the same key that is there already stays, unless it was found to be no
    good.

    Args:
        found: what a look for the set came to before; a hit is what ``built`` has, and is not made the owner's own.

    Raises:
        StoreError: a store cannot be opened as configured.
        OSError: a built file cannot be read.
    """
    entries = dict(built.files) if built.library is None else {**built.files, CPU_LIBRARY: built.library}
    files = {name: file.path for name, file in entries.items()}
    manifest = dataclasses.replace(
        new_manifest("aot", factors, files, snapcap_version(), {"signatures": dict(built.input_specs)}),
        entries={name: file.blob for name, file in entries.items()},  # digests of the checked files
    )
    if found.result == "hit":
        local = Published("exists", found.reason)
    else:
        local = _publish_locally(manifest, files, options, found)
    if not to_remote or options.store.remote is None:
        return Publication(local, None)
    store = open_store(options.store.remote, options.s3, trust_of(options.store))
    return Publication(local, publish(store, manifest, files, signer_of(options), found.unusable))


def _publish_locally(
    manifest: Manifest, files: Mapping[str, Path], options: StartOptions, found: Fetched
) -> Published:
    """Publish to the local folder, and vouch there for what was made here, signed by whomever; but not for what was
    made from somebody else's set, which must not outlive the trust in that."""
    folder, signer, name = FolderStore.open(options.store_folder), signer_of(options), manifest_name(manifest.key)
    try:
        used = folder.read(name, MAX_ENVELOPE_BYTES) if found.result == "hit" else None
        own = used is None or folder.is_vouched(used.data)
        if not own and signer is None and not trust_of(options.store).owner_suffices:
            return Published("exists", f"{found.reason}; what it lacks stays here, as there is no --sign-key")
        if own:
            folder.vouch(seal(manifest, signer))  # before: no set of ours is ever there without
    except StoreError as error:
        return Published("error", str(error))
    return publish(folder, manifest, files, signer, found.in_the_way)


def publish_weights(checkpoint: Checkpoint, plan: Plan, options: StartOptions) -> Published:
    """Publish the prepared weights that are in the local folder, with the small files of their checkpoint, to the
    remote store, or to the folder where that is the store."""
    try:
        local, trust = FolderStore.open(options.store_folder), trust_of(options.store)
        model = describe_model(options, checkpoint, plan, local)
        remote = options.store.remote
        store = local if remote is None else open_store(remote, options.s3, trust)
    except (UserError, OSError) as error:
        return Published("error", one_line(error))
    return publish_model(store, model, signer_of(options), trust)


def report(published: Published, status: StartupStatus) -> None:
    """Count what came of publishing in a server, and log it."""
    status.published(published.result)
    level = logging.INFO if published.done else logging.ERROR
    _logger.log(level, "artifacts", extra={"fields": {"result": published.result, "reason": published.reason}})


def publish_jit(files: Mapping[str, Path], factors: Factors, options: StartOptions, found: Fetched) -> Published:
    """Publish a jit set to the local folder; in place of what was ``found`` there, if that lacked something.

    Raises:
        StartError, StoreError, OSError: as above.
    """
    manifest = new_manifest("jit", factors, files, snapcap_version())
    return _publish_locally(manifest, files, options, found)
