"""Refuses files and folders of an artifact folder that others than their owner could have written."""

import os
import stat
from pathlib import Path

from snapcap.warmup.store.store import StoreRefusedError


def check_owner(path: Path, status: os.stat_result, more: str = "") -> None:
    """Refuse what others than this user and root could have written.

    Raises:
        StoreRefusedError: they could; says what to do.
    """
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreRefusedError(
            f"others may write to {path} in the artifact folder, and what they write would be run: "
            f"chmod go-w it{more}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise StoreRefusedError(
            f"{path} in the artifact folder belongs to user {status.st_uid}, who could change what would be run; "
            "choose a folder of your own"
        )
