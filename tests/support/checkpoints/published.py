"""Makes up a published model: weights of any bytes, described as a build describes a checkpoint's."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapcap.warmup.artifacts.manifest import Weights, describe_all, new_manifest
from snapcap.warmup.artifacts.publish import ModelFiles, digests

IDENTITY = {"config.json": '"1" 2', "model.safetensors": '"0123" 4'}
FACTORS = {"kind": "model", "model.source": "s3://bucket/x", "device.type": "cpu", "model.dtype": "float32"}


def make_model(folder: Path, size: int) -> ModelFiles:
    weights = folder / "weights"
    weights.write_bytes(os.urandom(size))
    files = {"config.json": folder / "config.json", "tokenizer.json": folder / "tokenizer.json"}
    for name, path in files.items():
        path.write_text(f'{{"name": "{name}"}}')
    blob, chunks = digests(weights)
    described = Weights(blob, chunks, "ab" * 32, IDENTITY)
    manifest = new_manifest("model", FACTORS, describe_all(files), weights=described)
    return ModelFiles(replace(manifest, created="2026-01-01T00:00:00+00:00"), files, weights)


def upload_checkpoint(s3: Any, folder: Path, bucket: str, prefix: str) -> str:
    """Put the files of a checkpoint into S3; returns the source."""
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".py":
            s3.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
    return f"s3://{bucket}/{prefix}"
