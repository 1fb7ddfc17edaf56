"""Opens the store that a user has named, and says whose artifacts may come from it."""

from pathlib import Path

from snapcap.warmup.artifacts.signing import KeyFileError, Trust
from snapcap.warmup.errors import StartError
from snapcap.warmup.options import S3Options, StoreOptions, is_remote
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.s3 import S3Store
from snapcap.warmup.store.store import ArtifactStore, StoreRefusedError


def check_store(address: str, trust: Trust) -> None:
    """Refuse what must not be opened, without opening it: this imports no boto3.

    Args:
        trust: whose artifacts of an S3 store may run here; a folder is trusted for whom it belongs to.

    Raises:
        StoreRefusedError: an S3 store from which nothing could be accepted, or an address that is none.
    """
    if not is_remote(address):
        return
    if not address.startswith("s3://"):
        raise StoreRefusedError(f"{address!r} is no artifact store; write s3://bucket/prefix or a folder")
    if trust.nobody:
        raise StoreRefusedError(
            f"{address} is refused: whoever can write there could run code here. Name the key it is signed with by "
            "--trusted-key FILE, or accept anybody's artifacts with --allow-unsigned"
        )


def open_store(address: str, s3: S3Options, trust: Trust) -> ArtifactStore:
    """Open ``s3://bucket/prefix`` or a folder. Nothing is sent to S3 yet.

    Raises:
        StoreRefusedError: as for ``check_store``; or others may write to the folder, or the S3 options cannot be.
    """
    check_store(address, trust)
    if is_remote(address):
        return S3Store.open(address, s3)
    return FolderStore.open(Path(address))


def read_trust(options: StoreOptions) -> Trust:
    """Read the keys of these options.

    Raises:
        KeyFileError: a key file cannot be read.
    """
    return Trust.from_files(options.accepted_keys, options.allow_unsigned, options.min_built)


def trust_of(options: StoreOptions) -> Trust:
    """Returns the trust in the store's artifacts: the keys whose signatures are accepted.

    Raises:
        StartError: a key file cannot be read, or an S3 store is given without any trust.
    """
    try:
        trust = read_trust(options)
        check_store(options.address, trust)
    except (KeyFileError, StoreRefusedError) as error:
        raise StartError(str(error)) from None
    return trust
