"""Checkpoints of S3, kept in a local folder that is brought up to date with what the prefix holds."""

import hashlib
import json
import os
import time
from pathlib import Path
from uuid import uuid4

from warmup.checkpoint_files import CheckpointError, checkpoint_names
from warmup.s3 import Download, S3Object, S3Options, client, download, list_objects, split_uri
from warmup.s3_errors import S3Error

_SIDECAR = ".snapcap-s3.json"  # what each file was downloaded from: {name: {"etag": …, "size": …}}

Record = dict[str, dict[str, str | int]]


def fetch(source: str, cache: Path, options: S3Options) -> Path:
    """Download the checkpoint under ``s3://bucket/prefix``; files that are still what S3 has are kept.

    Returns:
        The folder in ``cache``.

    Raises:
        CheckpointError: the prefix cannot be read or holds no checkpoint.
    """
    deadline = time.monotonic() + options.deadline
    try:
        bucket, prefix = split_uri(source)
        s3 = client(options)
        wanted = _wanted(source, list_objects(s3, bucket, prefix, deadline))
        folder = cache / "checkpoints" / _folder_name(bucket, prefix, options.endpoint_url)
        record = _prepare(folder, wanted)
        missing = [Download(entry, folder / name) for name, entry in wanted.items() if name not in record]
        for item in download(s3, bucket, missing, deadline):
            record[item.dest.name] = _entry(item.source)
            _write(folder, record)
    except S3Error as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"cannot write to {cache}: {error.strerror}; choose another cache folder") from error
    return folder


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
    return f"{prefix.rpartition('/')[2] or bucket}-{digest}"


def _prepare(folder: Path, wanted: dict[str, S3Object]) -> Record:
    """Make the folder, remove what the prefix no longer has, and return the record of what is still good."""
    folder.mkdir(parents=True, exist_ok=True)
    record: Record = {}
    for name, entry in _read(folder).items():
        file = folder / name
        if name not in wanted:
            file.unlink(missing_ok=True)
        elif entry == _entry(wanted[name]) and file.is_file() and file.stat().st_size == wanted[name].size:
            record[name] = entry
    _write(folder, record)
    return record


def _entry(source: S3Object) -> dict[str, str | int]:
    return {"etag": source.etag, "size": source.size}


def _read(folder: Path) -> Record:
    """The record; empty when it is damaged, which only costs a download."""
    try:
        value = json.loads((folder / _SIDECAR).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: entry for name, entry in value.items() if Path(name).name == name}


def _write(folder: Path, record: Record) -> None:
    temporary = folder / f"{_SIDECAR}.{uuid4().hex}"
    temporary.write_text(json.dumps(record, indent=1))
    os.replace(temporary, folder / _SIDECAR)
