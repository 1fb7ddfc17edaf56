"""Drops the page cache, so that what is started next reads its files from the disk.

What another process has mapped stays in memory, and a virtual machine's host may keep what its guest has dropped.
"""

import os
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_ALL = "3"  # pages, and the names and places of files


class PageCacheError(RuntimeError):
    """The page cache cannot be dropped; one line that says what it takes."""

    def __init__(self) -> None:
        super().__init__(f"--cold-disk drops the page cache, which takes root and a writable {DROP_CACHES}")


def require_drop() -> None:
    """Raises PageCacheError where this process may not drop the page cache."""
    if os.geteuid() != 0 or not os.access(DROP_CACHES, os.W_OK):
        raise PageCacheError


def drop_page_cache() -> None:
    """Drop it; what has not been written yet is written first, or it would stay.

    Raises:
        PageCacheError: the kernel refuses, as in a container that is root in its own name alone.
    """
    os.sync()
    try:
        DROP_CACHES.write_text(_ALL)
    except OSError as error:
        raise PageCacheError from error
