"""Says what a source of checkpoints names, and finds the folder of one that is on this machine.

`resolve.py` does so for every start, `snapcap serve` before it forks anything; so it imports next to nothing.
"""

import os
import stat
from pathlib import Path
from typing import Literal

from snapcap.models.fields import ConfigError, is_there, json_or_empty
from snapcap.warmup.checkpoints.patterns import ADAPTER, CheckpointError

SHIPPED = "demo"
S3 = "s3://"
Kind = Literal["shipped", "s3", "folder", "hub"]


def kind_of(source: str) -> Kind:
    """Returns the kind of place that a source names, as ``resolve_checkpoint`` reads it. The place need not
    exist."""
    if source == SHIPPED:
        return "shipped"
    if source.startswith(S3):
        return "s3"
    return "folder" if _looks_like_path(source) or _exists(source) else "hub"


def local_folder(source: str) -> Path | None:
    """The folder that a source names; None for one that is shipped or elsewhere: ``demo``, S3, the hub.

    Raises:
        CheckpointError: it is meant as a folder, and is none, or holds no checkpoint.
    """
    if source == SHIPPED or source.startswith(S3):
        return None
    try:
        folder = Path(source).expanduser()
    except RuntimeError:
        raise CheckpointError(
            f"there is no home folder for {source!r}; give a folder, a hub id or s3://…"
        ) from None
    try:
        mode = folder.stat().st_mode  # Path.is_dir of some versions of Python says no where it may not look
        if stat.S_ISDIR(mode):
            return checked(folder, source)
        raise CheckpointError(f"{source!r} is a file; give the folder that holds config.json")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: what no file can be called
        pass
    except OSError as error:
        raise CheckpointError(
            f"{source!r} cannot be read: {error.strerror}; give a folder, a hub id or s3://…"
        ) from None
    if _looks_like_path(source):
        raise CheckpointError(f"there is no folder {source!r}; give a folder, a hub id or s3://bucket/prefix")
    return None


def checked(folder: Path, source: str) -> Path:
    """The folder, which holds a checkpoint.

    Raises:
        CheckpointError: it holds none, or an adapter of one, or may not be looked at.
    """
    try:
        found = is_there(folder / "config.json")
        if is_there(folder / ADAPTER):
            raise adapter_error(source, json_or_empty(folder / ADAPTER).get("base_model_name_or_path"))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if found:
        return folder
    raise CheckpointError(f"{source!r} has no config.json; give the folder that save_pretrained wrote")


def adapter_error(source: str, base: object = None) -> CheckpointError:
    """The refusal of a PEFT adapter. ``base``: the model that it adapts, if that is known."""
    model = repr(base[:200]) if isinstance(base, str) and base.isprintable() else "another model"
    return CheckpointError(
        f"{source!r} holds a PEFT adapter of {model} ({ADAPTER}), which is not served; merge it in Python, "
        f"PeftModel.from_pretrained(model, {source!r}).merge_and_unload().save_pretrained('merged'), and give that "
        f"folder; where the weights are merged already, remove {ADAPTER}"
    )


def _exists(source: str) -> bool:
    try:
        return Path(source).expanduser().exists()
    except (OSError, RuntimeError):  # no name of a file here, or no home folder
        return False


def _looks_like_path(source: str) -> bool:
    """Returns whether a source that does not exist was meant as a folder, not as ``owner/name`` on the hub."""
    if not source or source[0] in "./~" or (os.sep != "/" and os.sep in source):
        return True
    parent, slash, _ = source.rpartition("/")
    return bool(slash) and ("/" in parent or os.path.isdir(parent))  # isdir never raises
