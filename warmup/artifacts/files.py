"""Writes files whole or not at all, reads them as what they were verified to be, and copies them."""

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from uuid import uuid4

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.manifest import Blob
from snapcap.warmup.machine.files import make_folder, open_regular, sync


class ChangedError(OSError):
    """A file does not hold what it was verified to hold."""


@dataclass(frozen=True)
class VerifiedFile:
    """A file and the content that it was verified to have, which is the only one it is ever used with."""

    path: Path
    blob: Blob

    @classmethod
    def of(cls, path: Path) -> "VerifiedFile":
        """A file as it is now.

        Raises:
            OSError: it cannot be read.
        """
        return cls(path, describe(path))

    def read(self) -> bytes:
        """The content, verified again as the bytes that are returned: the file may have changed since.

        Raises:
            ChangedError: it has.
            OSError: it cannot be read.
        """
        with open_regular(self.path) as file:
            data = file.read(self.blob.size + 1)
        if Blob(hashlib.sha256(data).hexdigest(), len(data)) != self.blob:
            raise ChangedError(f"{self.path.name} has changed since it was verified")
        return data


def describe(path: Path) -> Blob:
    """Digest and size of a file.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return Blob(digest.hexdigest(), file.tell())


def describe_all(files: Mapping[str, Path]) -> dict[str, Blob]:
    """Digest and size of each file by its name. Raises OSError."""
    return {name: describe(path) for name, path in files.items()}


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a file that is to become it by ``commit``; without a commit it is removed."""
    make_folder(path.parent)
    temporary = path.with_name(f".{uuid4().hex}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def commit(temporary: Path, path: Path, durable: bool = True) -> None:
    """Put a complete file in place, whole or not at all.

    Args:
        durable: also after a power cut; otherwise it may then hold anything, which only those can bear who verify
            what they read, and can have it again.
    """
    make_folder(path.parent)
    with contextlib.suppress(OSError):  # a file system without modes; whoever reads looks who may write
        temporary.chmod(0o600)
    if durable:
        sync(temporary)
    os.replace(temporary, path)
    if durable:
        sync(path.parent)


_PIECE = 1024 * 1024


def copy_file(source: Path, target: Path) -> None:
    """Raises:
    OSError: it cannot be copied, or is not a regular file.
    """
    with open_regular(source) as opened, target.open("wb") as file:
        shutil.copyfileobj(opened, file, _PIECE)


def link_or_copy(source: Path, target: Path) -> None:
    """A second name of a file, or a copy where the file system has no links. Raises OSError."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        copy_file(source, target)


def pieces(descriptor: int, start: int, end: int, deadline: float) -> Iterator[bytes]:
    """Bytes [start, end) of an open file, at most 1 MiB at a time.

    Args:
        deadline: the moment of ``time.monotonic()`` to give up at.

    Raises:
        OSError: it cannot be read, is shorter than that, or it is too late.
    """
    while start < end:
        if time.monotonic() >= deadline:
            raise TimeoutError("copying did not finish before its deadline")
        piece = os.pread(descriptor, min(end - start, _PIECE), start)
        if not piece:
            raise OSError(errno.EIO, "the file has become shorter")
        start += len(piece)
        yield piece
