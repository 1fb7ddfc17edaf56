"""Downloads checkpoints from S3 into a local folder, and updates the folder when the objects change.

Downloaded files are used at once. Until they are synced to the disk, their record is valid only until the next
reboot, because a crash could lose them. A thread syncs the files after the start; then the record stays valid.
"""

import hashlib
import json
import logging
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.errors import WeightsError
from snapcap.models.json_object import load_object
from snapcap.models.weights.listing import MOST_INDEX_BYTES, is_safe_name, weight_names
from snapcap.warmup.checkpoints.local import (
    ADAPTER,
    OUTAGE_S,
    CheckpointError,
    adapter_error,
    checkpoint_names,
    report_unasked,
)
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.files import make_folder, open_regular, sync, write_file
from snapcap.warmup.machine.worker import within
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.client import S3Error, client, split_uri
from snapcap.warmup.s3.download import ObjectRanges, S3Object, download, list_objects, remove_unfinished

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# This file exists while a folder with files is being updated. A new folder needs no such file: its weights, which
# are downloaded last, show that it is complete.
_PARTIAL = ".snapcap-s3.partial"
# The record of the S3 object of each file: {name: {"etag": …, "size": …}}, with "boot" until the file is synced.
_SIDECAR = ".snapcap-s3.json"
_MOST_NAME = 200  # bytes; a file system takes 255
_SIDECAR_BYTES = 4 * 1024 * 1024
_SETTLE_SECONDS = 5.0  # from the download to its sync: the start needs the disk before
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Entry = dict[str, str | int]
Record = dict[str, Entry]

_logger = logging.getLogger("snapcap.start")


def download_checkpoint(source: str, cache: Path, options: S3Options) -> Path:
    """Download the checkpoint under ``s3://bucket/prefix``. Unchanged files are kept.

    If S3 does not answer, a complete checkpoint on this disk is used. Returns the folder in ``cache``. Raises
    CheckpointError if the prefix cannot be read or holds no checkpoint, or the folder cannot be written."""
    deadline = time.monotonic() + options.deadline
    try:
        bucket, _ = split_uri(source)
        folder = download_folder(source, cache, options)
        try:
            s3, wanted = _listed(source, folder, options, deadline, brief=is_whole(folder))
        except (S3Error, TimeoutError) as error:
            if not is_whole(folder):
                raise
            report_unasked(source, error)
            return folder
        record = _prepare(folder, wanted)
        missing = {folder / name: entry for name, entry in wanted.items() if name not in record}
        boot = _boot()
        for path in download(s3 or client(options), bucket, missing, deadline) if missing else ():
            if boot is None:
                sync(path)
            name = path.relative_to(folder).as_posix()
            record[name] = _entry(wanted[name]) | ({"boot": boot} if boot else {})
            _write(folder, record)
        if (folder / _PARTIAL).exists():
            (folder / _PARTIAL).unlink(missing_ok=True)  # another start may have removed it just now
    except S3Error as error:
        hint = " (--cache-dir)" if isinstance(error.__cause__, OSError) else ""
        raise CheckpointError(f"{error}{hint}") from error
    except OSError as error:
        raise CheckpointError(
            f"{source} cannot be downloaded to {error.filename or cache}: {os_error_text(error)} (--cache-dir)"
        ) from error
    if any("boot" in entry for entry in record.values()):
        settling = threading.Timer(_SETTLE_SECONDS, _settle, (folder, record))
        settling.daemon = True
        settling.start()
    return folder


def _listed(
    source: str, folder: Path, options: S3Options, deadline: float, *, brief: bool
) -> "tuple[S3Client | None, dict[str, S3Object]]":
    """Returns a client for the download, and the objects of a checkpoint by name. ``brief``: returns no client, and
    gives up after ``OUTAGE_S``, because mostly nothing has changed. Raises S3Error or TimeoutError if S3 does not
    answer, and CheckpointError if the prefix holds no checkpoint."""
    if not brief:
        s3 = client(options)
        return s3, _wanted(s3, source, deadline, folder)
    seconds = min(options.deadline, OUTAGE_S)
    asked = replace(options, deadline=seconds)
    until = time.monotonic() + seconds
    return None, within(seconds, lambda: _wanted(client(asked), source, until, folder), "snapcap-source")


def is_whole(folder: Path) -> bool:
    """Returns whether a download folder has every file of a single revision, by its local record."""
    boot = _boot()
    try:
        record = _read(folder)
        return (
            "config.json" in record
            and not (folder / _PARTIAL).exists()
            and all(
                entry.get("boot", boot) == boot and _size(folder / name) == entry.get("size")
                for name, entry in record.items()
            )
            and set(weight_names(folder)) <= record.keys()
        )
    except (WeightsError, OSError, ValueError):
        return False


def download_folder(source: str, cache: Path, options: S3Options) -> Path:
    """Returns the folder that ``download_checkpoint`` would use. Raises S3Error if the source is invalid."""
    bucket, prefix = split_uri(source)
    # Equal prefixes of different buckets and stores have different folders.
    digest = hashlib.sha256(f"{options.endpoint_url or ''}\n{bucket}\n{prefix}".encode()).hexdigest()[:12]
    name = prefix.rpartition("/")[2] or re.split("[:/]", bucket)[-1]  # a bucket may be an ARN
    return cache / "checkpoints" / f"{name.encode()[:_MOST_NAME].decode(errors='ignore')}-{digest}"


def listed_identity(
    source: str, options: S3Options, deadline: float, s3: "S3Client | None" = None
) -> dict[str, str]:
    """Returns the ETag and size of each object of a checkpoint by name, as S3 lists them now. Arguments as for
    ``source.current_identity``. Raises CheckpointError if the prefix cannot be listed, or holds no checkpoint."""
    try:
        wanted = _wanted(s3 or client(options), source, deadline)
    except S3Error as error:
        raise CheckpointError(str(error)) from error
    return {name: _identity(_entry(entry)) for name, entry in wanted.items()}


def downloaded_identity(folder: Path) -> dict[str, str]:
    """Returns the recorded ETag and size of each object that was downloaded into a folder, by name."""
    return {name: _identity(entry) for name, entry in _read(folder).items() if {"etag", "size"} <= set(entry)}


def _identity(entry: Entry) -> str:
    return f"{entry['etag']} {entry['size']}"


def _settle(folder: Path, record: Record) -> None:
    """Sync downloaded files to the disk and record that, unless the files have been removed meanwhile."""
    try:
        for name, entry in record.items():
            if "boot" in entry:
                sync(folder / name)
        _write(folder, {name: {k: v for k, v in entry.items() if k != "boot"} for name, entry in record.items()})
    except FileNotFoundError:
        return
    except OSError as error:  # the server continues; after a reboot the next start downloads the files again
        fields = {"folder": str(folder), "error": os_error_text(error)}
        _logger.warning("the checkpoint could not be synced to the disk", extra={"fields": fields})


def _boot() -> str | None:
    """Returns the kernel's id of this boot, or None if the system has none."""
    try:
        return _BOOT.read_text().strip() or None
    except OSError:
        return None


def _wanted(s3: "S3Client", source: str, deadline: float, folder: Path | None = None) -> dict[str, S3Object]:
    """Returns the objects of a checkpoint by file name. Raises S3Error if the prefix, or an index of weights,
    cannot be read, and CheckpointError if the prefix holds no checkpoint.

    Args:
        folder: the download folder; an index of weights that it has already is not read from S3 again.
    """
    bucket, prefix = split_uri(source)

    def listed(below: str = "") -> dict[str, S3Object]:
        objects = list_objects(s3, bucket, "/".join(part for part in (prefix, below) if part), deadline)
        return {f"{below}/{name}".lstrip("/"): entry for entry in objects if (name := entry.key.rpartition("/")[2])}

    def read(index: str) -> bytes:
        entry = by_name[index]
        if folder is not None and _is_current(_read(folder).get(index), entry, folder / index):
            return (folder / index).read_bytes()
        ranges = ObjectRanges(s3, bucket, entry, deadline)
        if entry.size > MOST_INDEX_BYTES:
            raise CheckpointError(f"{ranges.where} has more than {MOST_INDEX_BYTES} bytes")
        return b"".join(ranges.read(0, entry.size)) if entry.size else b""

    by_name = listed()
    if not by_name:
        raise CheckpointError(f"there is nothing under {source}; check the prefix")
    if ADAPTER in by_name:
        raise adapter_error(source)
    if "config.json" not in by_name:
        raise CheckpointError(f"{source} has no config.json; give the prefix of the files save_pretrained wrote")
    names = checkpoint_names(by_name, read)
    for below in sorted({name.rpartition("/")[0] for name in names} - {""}):
        by_name |= listed(below)
    for name in names:
        if name not in by_name:
            raise CheckpointError(f"{source}: its index of weights names {name!r}, which is not there")
    return {name: by_name[name] for name in names}


def _prepare(folder: Path, wanted: dict[str, S3Object]) -> Record:
    """Create the folder, remove outdated files, and return the record of the unchanged files. A folder that is up
    to date is not written to."""
    make_folder(folder, 0o755)
    for place in {folder, *((folder / name).parent for name in wanted)}:
        if place.is_dir():
            remove_unfinished(place)
    known = _read(folder)
    record: Record = {}
    for name, entry in known.items():
        if name in wanted and _is_current(entry, wanted[name], folder / name):
            record[name] = entry
    if record != known or record.keys() != wanted.keys():
        if known:
            (folder / _PARTIAL).touch()
        for name in known.keys() - wanted.keys():
            (folder / name).unlink(missing_ok=True)
        _write(folder, record)
    return record


def _is_current(known: Entry | None, entry: S3Object, file: Path) -> bool:
    """Returns whether a local file is the object that S3 lists. The record must have the same ETag and size, and be
    synced or of this boot."""
    recorded = (_entry(entry), _entry(entry) | {"boot": _boot()})
    return known in recorded and _size(file) == entry.size


def _entry(source: S3Object) -> Entry:
    return {"etag": source.etag, "size": source.size}


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _read(folder: Path) -> Record:
    """Returns the record; empty if it is damaged, so that the files are downloaded again."""
    try:
        with open_regular(folder / _SIDECAR) as file:
            value = load_object(file.read(_SIDECAR_BYTES))
    except (OSError, ValueError):
        return {}
    return {name: e for name, e in value.items() if is_safe_name(name) and isinstance(e, dict)}


def _write(folder: Path, record: Record) -> None:
    write_file(folder / _SIDECAR, json.dumps(record, indent=1).encode(), durable=False)
