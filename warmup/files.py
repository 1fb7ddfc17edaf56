"""Files that are written whole or not at all, and what is in them."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from warmup.manifest import Blob


def describe(path: Path) -> Blob:
    """Digest and size of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Blob(digest.hexdigest(), file.tell())


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a file that is to become it by ``commit``; without a commit it is removed."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid4().hex}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def commit(temporary: Path, path: Path) -> None:
    """Put a complete file in place so that it survives a power cut, whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary.chmod(0o600)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
