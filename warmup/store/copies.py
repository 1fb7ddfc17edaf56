"""Copies and links files of a folder, and reads ranges of them."""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from snapcap.warmup.machine.files import open_regular

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
