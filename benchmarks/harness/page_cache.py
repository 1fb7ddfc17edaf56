"""Drops the page cache, so that the next start reads its files from the disk.

Files that another process has mapped stay in memory. A virtual machine's host may keep pages that its guest has
dropped.
"""

import os
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_ALL = "3"  # drops pages, and cached directory entries and inodes


class PageCacheError(RuntimeError):
    """The page cache cannot be dropped. The message is one line that says what is needed."""

    def __init__(self) -> None:
        super().__init__(f"--cold-disk drops the page cache, which takes root and a writable {DROP_CACHES}")


def require_drop() -> None:
    """Checks that this process may drop the page cache.

    Raises:
        PageCacheError: it may not.
    """
    if os.geteuid() != 0 or not os.access(DROP_CACHES, os.W_OK):
        raise PageCacheError


def drop_page_cache() -> None:
    """Drops the page cache. Unwritten data is written first, because it would otherwise stay.

    Raises:
        PageCacheError: the kernel refuses, as in a container whose root is root only inside of it.
    """
    os.sync()
    try:
        DROP_CACHES.write_text(_ALL)
    except OSError as error:
        raise PageCacheError from error
