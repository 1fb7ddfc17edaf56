"""Resolves a checkpoint's source, a name, folder, hub id or S3 prefix, to a folder on this machine."""

import os
from pathlib import Path

from snapcap import models
from snapcap.warmup.cache_folder import is_temporary
from snapcap.warmup.checkpoints import hub
from snapcap.warmup.checkpoints import s3 as s3_checkpoint
from snapcap.warmup.checkpoints.local import S3, SHIPPED, checked, local_folder
from snapcap.warmup.machine.denied import report_denied
from snapcap.warmup.options import S3Options


def resolve_checkpoint(source: str, cache: Path, s3: S3Options) -> Path:
    """The folder of a checkpoint, downloaded first where it is not on this machine.

    Args:
        source: ``demo`` for the model that ships with snapcap; a folder; ``s3://bucket/prefix``; or a hub id,
            ``owner/name`` or ``owner/name@revision``.
        cache: the folder for downloads from S3. The hub has its own (``HF_HOME``).
        s3: where S3 is, and how long to wait for it.

    Raises:
        CheckpointError: the source does not exist, cannot be reached, or holds no checkpoint.
    """
    if is_temporary(cache, "snapcap"):
        effect = f"{cache} is the cache folder, which may be gone after a restart; set --cache-dir"
        report_denied("the home folder", effect, f"HOME={os.environ.get('HOME', '')}")
    if source == SHIPPED:
        return Path(str(models.__file__)).parent / "demo"
    if source.startswith(S3):
        return s3_checkpoint.download_checkpoint(source, cache, s3)
    return local_folder(source) or checked(hub.download_checkpoint(source), source)
