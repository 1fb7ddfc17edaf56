"""Refuses files and folders of an artifact folder that others than their owner could have written."""

import contextlib
import os
import stat
from pathlib import Path

from snapcap.warmup.machine.files import other_writers
from snapcap.warmup.store.store import StoreRefusedError


def check_owner(path: Path, status: os.stat_result, more: str = "") -> None:
    """Refuse what others than this user and root could have written.

    Raises:
        StoreRefusedError: they could; says what to do.
    """
    others = other_writers(status)
    if others:
        raise StoreRefusedError(
            f"others may write to {path} in the artifact folder ({others}), and what they write would be run: "
            f"chmod go-w it{more}"
            + (", or under Kubernetes set fsGroupChangePolicy: OnRootMismatch" if "group" in others else "")
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise StoreRefusedError(
            f"{path} in the artifact folder belongs to user {status.st_uid}, who could change what would be run; "
            "choose a folder of your own"
        )


def close_to_group(path: Path, status: os.stat_result) -> None:
    """Take the right to write to a checked folder away from its group, where the folder is this user's.

    Kubernetes gives that right to a Pod's ``fsGroup`` when it mounts a volume. A process of the group that this
    system does not know can then no longer replace what is verified.
    """
    if status.st_mode & stat.S_IWGRP and status.st_uid == os.geteuid():
        with contextlib.suppress(OSError):
            path.chmod(stat.S_IMODE(status.st_mode) & ~stat.S_IWGRP)
