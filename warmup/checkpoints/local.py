"""Classifies a model source, lists the files of a checkpoint, and finds the folder of a local one.

`snapcap serve` uses this module before its first fork, so the module imports almost nothing.
"""

import contextlib
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from snapcap.models.errors import UserError
from snapcap.models.fields import ConfigError, is_there, json_or_empty

ADAPTER = "adapter_config.json"  # PEFT's file, also downloaded, so that the refusal can name the adapted model
# Files of a chat template and a tokenizer, beside config.json.
TEXT_FILES = (
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
METADATA = ("config.json", ADAPTER, "generation_config.json", "preprocessor_config.json", *TEXT_FILES, "*.model")

OUTAGE_S = 10.0  # seconds for a source to name its revision, if this machine already has a copy
_logger = logging.getLogger("snapcap.start")


class CheckpointError(UserError):
    """Says in one line why a checkpoint cannot be used, and what to do."""


def report_unasked(source: str, error: object) -> None:
    """Log that a start uses the local copy, because the source does not name its revision. ``error``: the reason;
    without a text the source took too long."""
    reason = " ".join(str(error).split()) or f"no answer within {OUTAGE_S:g} s"
    fields = {"model": source, "reason": reason}
    _logger.warning(
        "the source of the model does not answer; the copy on this disk is used", extra={"fields": fields}
    )


def metadata_among(names: Iterable[str]) -> list[str]:
    """Returns the names that match a pattern of ``METADATA``, in their order."""
    return [name for name in names if name.isprintable() and any(fnmatchcase(name, each) for each in METADATA)]


def checkpoint_names(names: Iterable[str], read: Callable[[str], bytes]) -> list[str]:
    """Returns the names of the files to download: the model's description and its weights, also in subfolders.
    ``names``: the files of the checkpoint's own folder. ``read`` returns the content of an index of weights. Raises
    CheckpointError if the index is invalid, or names a file outside of the checkpoint."""
    from snapcap.models.errors import WeightsError  # noqa: PLC0415  only downloads need it
    from snapcap.models.weights.listing import choose_weights  # noqa: PLC0415  only downloads need it

    every = list(names)
    try:
        weights = choose_weights(set(every).__contains__, read)
    except WeightsError as error:
        raise CheckpointError(str(error)) from error
    described = [name for name in metadata_among(every) if "/" not in name]
    return described + [name for name in weights if name not in described]


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
    """Returns the folder that a source names; None for ``demo``, S3 and the hub. Raises CheckpointError if the
    source looks like a path, but is no folder, or the folder holds no checkpoint."""
    if source == SHIPPED or source.startswith(S3):
        return None
    if "://" in source:
        shown = re.sub("//[^/]*@", "//…@", source)[:200]  # the URL may contain a password
        raise CheckpointError(f"{shown!r} is a URL; give the hub id, such as owner/name, a folder, or s3://…")
    try:
        folder = Path(source).expanduser()
    except RuntimeError:
        raise CheckpointError(
            f"there is no home folder for {source!r}; give a folder, a hub id or s3://…"
        ) from None
    try:
        mode = folder.stat().st_mode  # without permission, some versions of Path.is_dir return False
        if stat.S_ISDIR(mode):
            return checked(folder, source)
        raise CheckpointError(f"{source!r} is a file; give the folder that holds config.json")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have this name
        pass
    except OSError as error:
        raise CheckpointError(
            f"{source!r} cannot be read: {error.strerror}; give a folder, a hub id or s3://…"
        ) from None
    if _looks_like_path(source):
        raise CheckpointError(f"there is no folder {source!r}; give a folder, a hub id or s3://bucket/prefix")
    return None


def checked(folder: Path, source: str) -> Path:
    """Returns the folder. Raises CheckpointError if it holds no checkpoint, only an adapter, or is unreadable."""
    try:
        found = is_there(folder / "config.json")
        if is_there(folder / ADAPTER):
            raise adapter_error(source, json_or_empty(folder / ADAPTER).get("base_model_name_or_path"))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if found:
        return folder
    below = _folder_below(folder)
    if below is not None:
        raise CheckpointError(f"{source!r} has no config.json, but {str(below)!r} has one; give that folder")
    raise CheckpointError(f"{source!r} has no config.json; give the folder that save_pretrained wrote")


def _folder_below(folder: Path) -> Path | None:
    """Returns a subfolder with a checkpoint, such as a snapshot of the hub's cache or of a training; or None."""
    for pattern in ("snapshots/*/config.json", "*/config.json"):
        with contextlib.suppress(OSError):
            found = next(folder.glob(pattern), None)
            if found is not None:
                return found.parent
    return None


def adapter_error(source: str, base: object = None) -> CheckpointError:
    """Returns the refusal of a PEFT adapter. ``base``: the adapted model, if known."""
    model = repr(base[:200]) if isinstance(base, str) and base.isprintable() else "another model"
    return CheckpointError(
        f"{source!r} holds a PEFT adapter of {model} ({ADAPTER}), which is not served; merge it in Python, "
        f"PeftModel.from_pretrained(model, {source!r}).merge_and_unload().save_pretrained('merged'), and give that "
        f"folder; where the weights are merged already, remove {ADAPTER}"
    )


def _exists(source: str) -> bool:
    try:
        return Path(source).expanduser().exists()
    except (OSError, RuntimeError):  # an invalid file name, or no home folder
        return False


def _looks_like_path(source: str) -> bool:
    """Returns whether a source that does not exist was meant as a folder, not as ``owner/name`` on the hub."""
    if not source or source[0] in "./~" or (os.sep != "/" and os.sep in source):
        return True
    parent, slash, _ = source.rpartition("/")
    return bool(slash) and ("/" in parent or os.path.isdir(parent))  # isdir never raises
