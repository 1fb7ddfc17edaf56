"""Downloads checkpoints of S3 into a local folder, which is brought up to date with what the prefix holds.

What was downloaded counts at once, until this machine is started again: only then could files be lost that were in
the memory of its system. Beside the start they are written to the disk, and count for good.
"""

import hashlib
import json
import logging
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from snapcap.models.weights.listing import WeightsError, weight_files
from snapcap.warmup.checkpoints.patterns import (
    OUTAGE_S,
    CheckpointError,
    checkpoint_names,
    is_checkpoint_name,
    report_unasked,
)
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.bounded import within
from snapcap.warmup.machine.files import make_folder, open_regular, sync
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.download import (
    Download,
    client,
    download,
    list_objects,
    remove_parts,
    split_uri,
)
from snapcap.warmup.s3.errors import S3Error
from snapcap.warmup.s3.ranges import S3Object

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# There from before the first change to a folder that has files until the last one has come. A folder that had none
# is whole when it has its weights, which come last.
_PARTIAL = ".snapcap-s3.partial"
# What each file was downloaded from: {name: {"etag": …, "size": …}}; and "boot" while it may not be on the disk.
_SIDECAR = ".snapcap-s3.json"
_MOST_NAME = 200  # bytes; a file system takes 255
_SIDECAR_BYTES = 4 * 1024 * 1024
_SETTLE_SECONDS = 5.0  # after the download: the start has other work for the disk
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Entry = dict[str, str | int]
Record = dict[str, Entry]

_logger = logging.getLogger("snapcap.start")


def download_checkpoint(source: str, cache: Path, options: S3Options) -> Path:
    """Download the checkpoint under ``s3://bucket/prefix``; files that are still what S3 has are kept.

    Where S3 does not answer, a checkpoint that is on this disk as a whole is used as it is.

    Returns:
        The folder in ``cache``.

    Raises:
        CheckpointError: the prefix cannot be read or holds no checkpoint, or the folder cannot be written.
    """
    deadline = time.monotonic() + options.deadline
    try:
        bucket, prefix = split_uri(source)
        folder = local_folder(source, cache, options)
        try:
            s3, objects = _listed(bucket, prefix, options, deadline, brief=is_whole(folder))
        except (S3Error, TimeoutError) as error:
            if not is_whole(folder):
                raise
            report_unasked(source, error)
            return folder
        wanted = _wanted(source, objects)
        record = _prepare(folder, wanted)
        missing = [Download(entry, folder / name) for name, entry in wanted.items() if name not in record]
        boot = _boot()
        for item in download(s3 or client(options), bucket, missing, deadline) if missing else ():
            if boot is None:
                sync(item.dest)
            record[item.dest.name] = _entry(item.source) | ({"boot": boot} if boot else {})
            _write(folder, record)
        if (folder / _PARTIAL).exists():
            (folder / _PARTIAL).unlink()
    except S3Error as error:
        hint = " (--cache-dir)" if isinstance(error.__cause__, OSError) else ""
        raise CheckpointError(f"{error}{hint}") from error
    except OSError as error:
        raise CheckpointError(
            f"{source} cannot be brought to {error.filename or cache}: {os_error_text(error)} (--cache-dir)"
        ) from error
    if any("boot" in entry for entry in record.values()):
        settling = threading.Timer(_SETTLE_SECONDS, _settle, (folder, record))
        settling.daemon = True
        settling.start()
    return folder


def _listed(
    bucket: str, prefix: str, options: S3Options, deadline: float, *, brief: bool
) -> "tuple[S3Client | None, list[S3Object]]":
    """A client to download with, and the objects under a prefix; without the client and within ``OUTAGE_S`` where
    the answer is needed ``brief``, as it is mostly that nothing has changed.

    Raises:
        S3Error, TimeoutError: S3 does not say.
    """
    if not brief:
        s3 = client(options)
        return s3, list_objects(s3, bucket, prefix, deadline)
    seconds = min(options.deadline, OUTAGE_S)
    asked = replace(options, deadline=seconds)
    until = time.monotonic() + seconds
    return None, within(seconds, lambda: list_objects(client(asked), bucket, prefix, until), "snapcap-source")


def is_whole(folder: Path) -> bool:
    """Whether a folder of downloads has every file of one revision, as far as this machine knows."""
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
            and {path.name for path in weight_files(folder)} <= record.keys()
        )
    except (WeightsError, OSError, ValueError):
        return False


def local_folder(source: str, cache: Path, options: S3Options) -> Path:
    """Where ``download_checkpoint`` would bring it. Raises S3Error."""
    bucket, prefix = split_uri(source)
    return cache / "checkpoints" / _folder_name(bucket, prefix, options.endpoint_url)


def listed_identity(
    source: str, options: S3Options, deadline: float, s3: "S3Client | None" = None
) -> dict[str, str]:
    """ETag and size of each object of a checkpoint as S3 lists them now, by name.

    Args:
        deadline: the moment of ``time.monotonic()`` to give up at.
        s3: a client that is there already; one takes a tenth of a second to make.

    Raises:
        CheckpointError: the prefix cannot be listed, or holds no checkpoint.
    """
    try:
        bucket, prefix = split_uri(source)
        wanted = _wanted(source, list_objects(s3 or client(options), bucket, prefix, deadline))
    except S3Error as error:
        raise CheckpointError(str(error)) from error
    return {name: _identity(_entry(entry)) for name, entry in wanted.items()}


def downloaded_identity(folder: Path) -> dict[str, str]:
    """The same of the objects that the files in a folder of downloads were."""
    return {name: _identity(entry) for name, entry in _read(folder).items() if {"etag", "size"} <= set(entry)}


def _identity(entry: Entry) -> str:
    return f"{entry['etag']} {entry['size']}"


def _settle(folder: Path, record: Record) -> None:
    """Write to the disk what may still be in memory alone, and note that it is there; unless it is gone by now."""
    try:
        for name, entry in record.items():
            if "boot" in entry:
                sync(folder / name)
        _write(folder, {name: {k: v for k, v in entry.items() if k != "boot"} for name, entry in record.items()})
    except FileNotFoundError:
        return
    except OSError as error:  # it serves all the same, and is downloaded again if the machine fails
        fields = {"folder": str(folder), "error": os_error_text(error)}
        _logger.warning("checkpoint not known to be on the disk", extra={"fields": fields})


def _boot() -> str | None:
    """What tells this run of the machine from all others; None where the system does not say."""
    try:
        return _BOOT.read_text().strip() or None
    except OSError:
        return None


def _wanted(source: str, objects: list[S3Object]) -> dict[str, S3Object]:
    by_name = {entry.key.rpartition("/")[2]: entry for entry in objects}
    if not by_name:
        raise CheckpointError(f"there is nothing under {source}; check the prefix")
    if "config.json" not in by_name:
        raise CheckpointError(f"{source} has no config.json; give the prefix of the files save_pretrained wrote")
    return {name: by_name[name] for name in checkpoint_names(by_name)}


def _folder_name(bucket: str, prefix: str, endpoint: str | None) -> str:
    """Readable, and different for equal prefixes of different buckets and stores."""
    digest = hashlib.sha256(f"{endpoint or ''}\n{bucket}\n{prefix}".encode()).hexdigest()[:12]
    name = prefix.rpartition("/")[2] or re.split("[:/]", bucket)[-1]  # which may be an ARN
    return f"{name.encode()[:_MOST_NAME].decode(errors='ignore')}-{digest}"


def _prepare(folder: Path, wanted: dict[str, S3Object]) -> Record:
    """Make the folder, remove what the prefix no longer has, and return the record of what is still good. A folder
    that is up to date is not written to."""
    make_folder(folder, 0o755)
    remove_parts(folder)
    known, boot = _read(folder), _boot()
    record: Record = {}
    for name, entry in known.items():
        expected = _entry(wanted[name]) if name in wanted else {}
        if entry in (expected, expected | {"boot": boot}) and _size(folder / name) == entry["size"]:
            record[name] = entry
    if record != known or record.keys() != wanted.keys():
        if known:
            (folder / _PARTIAL).touch()
        for name in known.keys() - wanted.keys():
            (folder / name).unlink(missing_ok=True)
        _write(folder, record)
    return record


def _entry(source: S3Object) -> Entry:
    return {"etag": source.etag, "size": source.size}


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _read(folder: Path) -> Record:
    """The record; empty when it is damaged, which only costs a download."""
    try:
        with open_regular(folder / _SIDECAR) as file:
            value = json.loads(file.read(_SIDECAR_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: e for name, e in value.items() if is_checkpoint_name(name) and isinstance(e, dict)}


def _write(folder: Path, record: Record) -> None:
    temporary = folder / f"{_SIDECAR}.{uuid4().hex}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(record, file, indent=1)
        os.replace(temporary, folder / _SIDECAR)
    finally:
        temporary.unlink(missing_ok=True)
