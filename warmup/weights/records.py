"""Records the digest of each checkpoint for the files that it was taken of. No torch."""

import hashlib
import json
import re
from dataclasses import asdict, fields
from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.manifest import is_digest
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.store import WEIGHTS, DamagedError
from snapcap.warmup.weights.identity import FileIdentity, Identity, is_at_rest

RECORD_NAME = re.compile(r"[0-9a-f]{64}\.json")
_MOST_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Record:
    """``digest`` of the content of ``files``; ``began``: when they were about to be read, in nanoseconds."""

    files: Identity
    digest: str
    began: int


def record_name(folder: Path) -> str:
    """Where the record of a checkpoint folder is: of its place, so that a new one takes the place of an old one."""
    return f"{WEIGHTS}/{hashlib.sha256(str(folder.resolve()).encode(errors='surrogateescape')).hexdigest()}.json"


def recorded_digest(store: FolderStore, folder: Path, files: Identity) -> str | None:
    """The digest of a checkpoint whose files are these, if it was recorded and they cannot have changed since.

    Raises:
        StoreError: the record cannot be read, or others may write to it.
    """
    record = read_record(store, record_name(folder))
    known = record is not None and record.files == files and is_at_rest(files, record.began)
    return record.digest if record is not None and known else None


def read_record(store: FolderStore, name: str) -> Record | None:
    """None where there is none, or none that can be read as one.

    Raises:
        StoreError: as above.
    """
    try:
        stored = store.read(name, _MOST_BYTES)
    except DamagedError:
        return None
    if stored is None:
        return None
    try:
        value = json.loads(stored.data)
        files = tuple(FileIdentity(**file) for file in value["files"])
        record = Record(files, value["digest"], value["began"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if is_digest(record.digest) and type(record.began) is int and all(map(_is_typed, files)) else None


def write_record(store: FolderStore, folder: Path, record: Record) -> None:
    """Raises:
    StoreError: it cannot be written.
    """
    store.write(record_name(folder), json.dumps(asdict(record)).encode())


def _is_typed(file: FileIdentity) -> bool:
    return all(type(getattr(file, field.name)) is field.type for field in fields(file))
