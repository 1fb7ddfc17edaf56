"""Resolves a model's source to a folder on this machine, and identifies its revision. Imports no torch.

    demo                     part of snapcap
    a folder                 used in place
    s3://bucket/prefix       identified by its list of names, sizes and ETags
    owner/name@<commit>      identified without a request: a commit never changes
    owner/name[@branch]      identified by the hub's answer, a commit

A folder's weights are never published, because the same path may hold another model on another machine.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.errors import WeightsError
from snapcap.models.weights.listing import weight_files
from snapcap.warmup.cache_folder import is_temporary
from snapcap.warmup.checkpoints import hub
from snapcap.warmup.checkpoints import s3 as s3_checkpoint
from snapcap.warmup.checkpoints.local import S3, SHIPPED, CheckpointError, checked, kind_of, local_folder
from snapcap.warmup.machine.denied import report_denied
from snapcap.warmup.machine.installation import package_folder
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.client import S3Error

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def resolve_checkpoint(source: str, cache: Path, s3: S3Options) -> Path:
    """Returns the folder of a checkpoint. Downloads it first if this machine does not have it. Raises
    CheckpointError if the source does not exist, cannot be reached, or holds no checkpoint.

    Args:
        source: ``demo`` for the model that ships with snapcap; a folder; ``s3://bucket/prefix``; or a hub id,
            ``owner/name`` or ``owner/name@revision``.
        cache: the folder for downloads from S3. The hub has its own (``HF_HOME``).
        s3: the endpoint and the timeouts of S3.
    """
    if is_temporary(cache):
        effect = f"{cache} is the cache folder, which may be gone after a restart; set --cache-dir"
        report_denied("the home folder", effect, f"HOME={os.environ.get('HOME', '')}")
    if source == SHIPPED:
        return package_folder("snapcap.models.demo")
    if source.startswith(S3):
        return s3_checkpoint.download_checkpoint(source, cache, s3)
    return local_folder(source) or checked(hub.download_checkpoint(source), source)


def is_publishable(source: str) -> bool:
    """Returns whether a source names the same model on every machine."""
    return kind_of(source) in ("s3", "hub")


def published_name(source: str) -> str:
    """Returns the canonical spelling of a source."""
    return source.rstrip("/") if kind_of(source) == "s3" else source


def folder_at_hand(source: str, cache: Path, options: S3Options) -> Path | None:
    """Returns the folder of a checkpoint without any request; None if this machine lacks a part of it."""
    try:
        match kind_of(source):
            case "shipped":
                folder: Path | None = package_folder("snapcap.models.demo")
            case "s3":
                folder = s3_checkpoint.download_folder(source, cache, options)
            case "folder":
                folder = local_folder(source)
            case "hub":
                folder = hub.cached_folder(source)
        whole = folder is not None and (folder / "config.json").is_file() and bool(weight_files(folder))
        return folder if whole else None
    except (S3Error, WeightsError, CheckpointError, OSError, ValueError):
        return None


def current_identity(
    source: str, options: S3Options, deadline: float, s3: "S3Client | None" = None
) -> Mapping[str, str]:
    """Returns the identity of the revision that a source names now. Raises CheckpointError if the source does not
    name its revision.

    Args:
        deadline: the moment of ``time.monotonic()`` to give up at.
        s3: an existing client; making one takes a tenth of a second.
    """
    if kind_of(source) == "s3":
        return s3_checkpoint.listed_identity(source, options, deadline, s3)
    commit = hub.pinned_commit(source)
    return {"commit": commit or hub.current_commit(source, max(0.1, deadline - time.monotonic()))}


def downloaded_identity(source: str, folder: Path) -> Mapping[str, str]:
    """Returns the identity of the revision that a folder was downloaded from. Raises CheckpointError if the folder
    does not record it."""
    if kind_of(source) == "s3":
        return s3_checkpoint.downloaded_identity(folder)
    commit = hub.commit_of(folder)
    if commit is None:
        raise CheckpointError(f"{source!r}: its folder in the hub's cache names no commit")
    return {"commit": commit}
