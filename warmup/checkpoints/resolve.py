"""Resolves a checkpoint's source, a name, folder, hub id or S3 prefix, to a folder on this machine."""

import os
from pathlib import Path
from typing import Literal

from snapcap import models
from snapcap.warmup.checkpoints import hub
from snapcap.warmup.checkpoints import s3 as s3_checkpoint
from snapcap.warmup.checkpoints.patterns import CheckpointError
from snapcap.warmup.options import S3Options

Kind = Literal["shipped", "s3", "folder", "hub"]


def kind_of(source: str) -> Kind:
    """What a source names, as ``resolve_checkpoint`` takes it, whether it is there or not."""
    if source == "demo":
        return "shipped"
    if source.startswith("s3://"):
        return "s3"
    return "folder" if _looks_like_path(source) or Path(source).exists() else "hub"


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
    if source == "demo":
        return _shipped()
    if source.startswith("s3://"):
        return s3_checkpoint.download_checkpoint(source, cache, s3)
    try:
        folder = Path(source).expanduser()
    except RuntimeError:
        raise CheckpointError(
            f"there is no home folder for {source!r}; give a folder, a hub id or s3://…"
        ) from None
    if folder.is_dir():
        return _checked(folder, source)
    if folder.exists():
        raise CheckpointError(f"{source!r} is a file; give the folder that holds config.json")
    if _looks_like_path(source):
        raise CheckpointError(f"there is no folder {source!r}; give a folder, a hub id or s3://bucket/prefix")
    return _checked(hub.download_checkpoint(source), source)


def _shipped() -> Path:
    return Path(str(models.__file__)).parent / "demo"


def _checked(folder: Path, source: str) -> Path:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{source!r} has no config.json; give the folder that save_pretrained wrote")
    return folder


def _looks_like_path(source: str) -> bool:
    """Whether a source that is not there was meant as a folder rather than as ``owner/name`` on the hub."""
    if not source or source[0] in "./~" or (os.sep != "/" and os.sep in source):
        return True
    parent, slash, _ = source.rpartition("/")
    return bool(slash) and ("/" in parent or Path(parent).is_dir())
