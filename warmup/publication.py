"""From a finished build to artifact stores: the local folder, and S3 where it may be written and is signed."""

from typing import NamedTuple

from warmup.build import Built
from warmup.folder_store import FolderStore
from warmup.key import Factors
from warmup.options import StartOptions
from warmup.plan import StartError
from warmup.prepare import trust_of
from warmup.publish import Published, new_manifest, publish
from warmup.signing import KeyFileError, Signer, load_signer
from warmup.stores import open_store
from warmup.version import snapcap_version


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
    """Publish a complete set. A set of the same key that is there already stays, unless ``replace`` says that it
    was found to be no good.

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
