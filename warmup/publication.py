"""From finished work to artifact stores: the local folder, and S3 where it may be written and is signed."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from warmup.build import Built
from warmup.child import Child, ChildError
from warmup.folder_store import FolderStore
from warmup.key import Factors
from warmup.options import StartOptions
from warmup.plan import StartError
from warmup.prepare import trust_of
from warmup.publish import Published, new_manifest, publish
from warmup.signing import KeyFileError, Signer, load_signer
from warmup.status import StartupStatus
from warmup.stores import open_store
from warmup.version import snapcap_version

_logger = logging.getLogger("snapcap.build")


class Publication(NamedTuple):
    """What came of publishing to the local folder, and to the remote store where there is one to publish to."""

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
    built: Built, factors: Factors, options: StartOptions, to_remote: bool, replace: bool = False
) -> Publication:
    """Publish a complete aot set. A set of the same key that is there already stays, unless ``replace`` says that
    it was found to be no good.

    Raises:
        StoreError: a store cannot be opened as configured.
        OSError: a built file cannot be read.
    """
    signer = signer_of(options)
    manifest = new_manifest("aot", factors, built.files, snapcap_version(), {"signatures": dict(built.signatures)})
    local = publish(FolderStore.open(options.store.folder), manifest, built.files, signer)
    if not to_remote or options.store.remote is None:
        return Publication(local, None)
    store = open_store(options.store.remote, options.s3, trust_of(options))
    return Publication(local, publish(store, manifest, built.files, signer, replace))


def report(published: Published, status: StartupStatus) -> None:
    """Count what came of publishing in a server, and log it."""
    status.published(published.result)
    level = logging.INFO if published.done else logging.ERROR
    _logger.log(level, "artifacts", extra={"fields": {"result": published.result, "reason": published.reason}})


def publish_jit(files: Mapping[str, Path], factors: Factors, options: StartOptions, replace: bool) -> Published:
    """Publish a jit set to the local folder; ``replace``: in place of one that lacked something.

    Raises:
        StartError, StoreError, OSError: as above.
    """
    manifest = new_manifest("jit", factors, files, snapcap_version())
    return publish(FolderStore.open(options.store.folder), manifest, files, signer_of(options), replace)


def publish_in_child(key: str, options: StartOptions, replace: bool) -> Published:
    """Publish the set of a key that is in the local folder to the remote store, without importing boto3 here."""
    store = options.store
    job = {
        "store": store.remote,
        "local": str(store.folder),
        "key": key,
        "sign_key": str(store.sign_key) if store.sign_key else None,
        "trusted_keys": [str(path) for path in store.trusted_keys],
        "allow_unsigned": store.allow_unsigned,
        "s3": asdict(options.s3),
        "replace": replace,
    }
    child = Child("warmup.publish_worker", job)
    try:
        child.start()
        answer = child.ask({})
    except (ChildError, OSError) as error:
        return Published("error", str(error))
    finally:
        child.kill()
    return Published(answer["result"], answer["reason"])
