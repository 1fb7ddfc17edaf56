"""Tells what a model's source is called in a store, and which revision of it is meant. No torch.

    s3://bucket/prefix       asked for its list: names, sizes and ETags
    owner/name@<commit>      not asked: nobody can change it
    owner/name[@branch]      asked for its commit

A folder's name says nothing of what it holds, so its weights are not published: they are prepared where it is.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.errors import WeightsError
from snapcap.models.weights.listing import weight_files
from snapcap.warmup.artifacts.key import Factors
from snapcap.warmup.checkpoints import hub
from snapcap.warmup.checkpoints import s3 as s3_checkpoint
from snapcap.warmup.checkpoints.local import kind_of
from snapcap.warmup.checkpoints.patterns import CheckpointError
from snapcap.warmup.options import S3Options, StartOptions
from snapcap.warmup.s3.errors import S3Error
from snapcap.warmup.store.store import MODELS
from snapcap.warmup.weights.key import model_factors

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def is_publishable(source: str) -> bool:
    """Returns whether a source names the same model on every machine."""
    return kind_of(source) in ("s3", "hub")


def published_name(source: str) -> str:
    """The one spelling of a source."""
    return source.rstrip("/") if kind_of(source) == "s3" else source


def model_factors_of(options: StartOptions) -> Factors:
    """Returns the factors of the key under which the model of these options is published and looked for.

    Raises:
        OSError, MachineError, StartError: as ``model_factors`` and ``device_and_dtype``.
    """
    from snapcap.warmup.plan.plan import device_and_dtype  # noqa: PLC0415  the module imports every family

    device, dtype = device_and_dtype(options.compute)
    return model_factors(published_name(options.model.source), device.partition(":")[0], dtype)


def is_at_hand(source: str, cache: Path, options: S3Options) -> bool:
    """Returns whether this machine has the whole checkpoint, judged by local files alone."""
    try:
        is_s3 = kind_of(source) == "s3"
        folder = s3_checkpoint.local_folder(source, cache, options) if is_s3 else hub.cached_folder(source)
        return folder is not None and (folder / "config.json").is_file() and bool(weight_files(folder))
    except (S3Error, WeightsError, OSError, ValueError):
        return False


def may_be_published(options: StartOptions) -> bool:
    """Returns whether a start should ask its store for the model: the machine has no checkpoint, and the store may
    have the model. The call itself sends no request."""
    model = options.model
    try:
        if not model.prepared_weights or not is_publishable(model.source):
            return False
        if is_at_hand(model.source, model.cache_dir, options.s3):
            return False
        return options.store.remote is not None or any((options.store_folder / MODELS).glob("*.json"))
    except (OSError, ValueError):  # the source cannot be a file's name
        return False


def current_identity(
    source: str, options: S3Options, deadline: float, s3: "S3Client | None" = None
) -> Mapping[str, str]:
    """Returns the identity of the revision that a source names now.

    Args:
        deadline: the moment of ``time.monotonic()`` to give up at.
        s3: a client that is there already.

    Raises:
        CheckpointError: the source does not say.
    """
    if kind_of(source) == "s3":
        return s3_checkpoint.listed_identity(source, options, deadline, s3)
    commit = hub.pinned_commit(source)
    return {"commit": commit or hub.current_commit(source, max(0.1, deadline - time.monotonic()))}


def downloaded_identity(source: str, folder: Path) -> Mapping[str, str]:
    """The same of the revision that a folder was downloaded from.

    Raises:
        CheckpointError: the folder does not say.
    """
    if kind_of(source) == "s3":
        return s3_checkpoint.downloaded_identity(folder)
    commit = hub.commit_of(folder)
    if commit is None:
        raise CheckpointError(f"{source!r}: its folder in the hub's cache names no commit")
    return {"commit": commit}
