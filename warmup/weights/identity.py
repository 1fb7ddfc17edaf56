"""Tells whether a checkpoint's weights are still the files that they were, and what they hold. No torch.

Reading a checkpoint takes seconds. So its digest is taken once, and found again by what the system says of the
files: a change of content, of a name or of a time gives another identity.
"""

import contextlib
import hashlib
from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.models.weights.listing import weight_names
from snapcap.warmup.machine.files import sync

# A file may be written twice at what a clock says is one moment, of up to two seconds on some file systems.
CLOCK_NS = 2_000_000_000


@dataclass(frozen=True)
class FileIdentity:
    """``name`` in the checkpoint's folder; ``path``: the file that it leads to; times in nanoseconds. No device,
    whose number may be another after each mount."""

    name: str
    path: str
    size: int
    modified: int
    changed: int
    inode: int


Identity = tuple[FileIdentity, ...]


def identify(folder: Path) -> Identity:
    """The files of a checkpoint folder that hold its weights, and the index that names them.

    Raises:
        WeightsError: there are none.
        OSError: one cannot be looked at.
    """
    return tuple(_identify(folder, name) for name in weight_names(folder))


def flushed_identity(folder: Path) -> Identity:
    """The identity after which any write gives another: one through a map changes a file's times only when it is
    the first since the page was written to the disk. Raises as ``identify``."""
    for name in weight_names(folder):
        with contextlib.suppress(OSError):  # where nothing can be written
            sync(folder / name)
    return identify(folder)


def is_at_rest(files: Identity, moment: int) -> bool:
    """Returns whether any change of the files after ``moment`` (nanoseconds of the clock) gives them another
    identity: no change was so shortly before that the next could have the same time. The system sets the time of
    change; nobody else can."""
    return all(max(file.changed, file.modified) <= moment - CLOCK_NS for file in files)


def content_digest(folder: Path) -> str:
    """SHA-256, in hex, of the names and contents of the weights' files, and of the index that names them.

    Raises:
        WeightsError, OSError: they cannot be read.
    """
    digest = hashlib.sha256()
    for name in weight_names(folder):
        with (folder / name).open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _identify(folder: Path, name: str) -> FileIdentity:
    real = (folder / name).resolve()
    status = real.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return FileIdentity(name, str(real), status.st_size, *times, status.st_ino)
