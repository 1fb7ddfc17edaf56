"""From what the user writes to an open store."""

from pathlib import Path

from snapcap.warmup.folder_store import FolderStore
from snapcap.warmup.s3 import S3Options
from snapcap.warmup.s3_store import S3Store
from snapcap.warmup.signing import Trust
from snapcap.warmup.store import ArtifactStore, StoreRefusedError


def is_remote(address: str) -> bool:
    """Whether a store is not a folder: then it is fetched from in a child process, into a local folder."""
    return "://" in address


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
    return FolderStore.open(Path(address).expanduser())
