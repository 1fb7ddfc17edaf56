"""Defines what a published model is made of: the small files of its checkpoint, and its weights by chunks."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.envelope import (
    ManifestError,
    check_age,
    load_object,
    open_payload,
    seal_payload,
)
from snapcap.warmup.artifacts.key import Factors, artifact_key, canonical_json
from snapcap.warmup.artifacts.manifest import (
    MAX_TOTAL_BYTES,
    Blob,
    blob_of,
    factors_of,
    field_of,
    is_digest,
    is_utc,
    is_version,
)
from snapcap.warmup.artifacts.signing import Signer, Trust

FORMAT = 1
MODEL_TYPE = "application/vnd.snapcap.model+json"
CHUNK_BYTES = 16 * 1024 * 1024
MAX_FILES_BYTES = 64 * 1024 * 1024  # all small files together: tokenizers have up to 20 MB

_MAX_FILES = 32
_MAX_OBJECTS = 1024  # objects of a source, shards included
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_IDENTITY_NAME = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,199}")


@dataclass(frozen=True)
class ModelManifest:
    """Describes the files that a machine needs to run a model, besides its packages.

    factors: source, device type, dtype, snapcap's sources and torch's version; ``key`` is their ``artifact_key``.
    identity: the source's revision at that time: ETag and size of each object, or the commit.
    checkpoint: SHA-256, in hex, of the checkpoint's weights as ``weights.identity`` takes it.
    files: the checkpoint's files but its weights, by name.
    weights: the file of prepared weights. chunks: SHA-256, in hex, of each ``CHUNK_BYTES`` of it.
    created: ISO 8601, UTC. builder: the snapcap version.
    """

    key: str
    factors: Factors
    identity: Mapping[str, str]
    checkpoint: str
    files: Mapping[str, Blob]
    weights: Blob
    chunks: tuple[str, ...]
    created: str
    builder: str
    format: int = FORMAT

    @property
    def content(self) -> str:
        """SHA-256, in hex, of what is verified of the weights, which are fetched by chunks: their size and digests.

        Nobody compares ``weights.digest`` with fetched bytes, so that says nothing of a file of them.
        """
        verified = {"size": self.weights.size, "chunk": CHUNK_BYTES, "digests": list(self.chunks)}
        return hashlib.sha256(canonical_json(verified)).hexdigest()


def seal_model(manifest: ModelManifest, signer: Signer | None) -> bytes:
    """The envelope of a manifest, signed if there is a signer.

    Raises:
        ManifestError: the manifest is one that ``open_model`` would refuse.
    """
    payload = canonical_json(asdict(manifest))
    _parse(payload)
    return seal_payload(payload, signer, MODEL_TYPE)


def open_model(data: bytes, key: str, trust: Trust) -> ModelManifest:
    """Verify an envelope, then parse the bytes that were verified.

    Raises:
        UntrustedError: there is no signature by a trusted key, and ``trust`` demands one; or it is too old.
        ManifestError: damaged, not the manifest of a model, or that of another key.
    """
    payload = open_payload(data, trust, MODEL_TYPE)
    try:
        manifest = _parse(payload)
    except RecursionError:
        raise ManifestError("the manifest's content is nested too deeply") from None
    if manifest.key != key:  # signed, but of something else
        raise ManifestError(f"the manifest under key {key[:12]} is that of key {manifest.key[:12]}")
    check_age(manifest.created, trust)
    return manifest


def _parse(payload: bytes) -> ModelManifest:
    """Strict: what this version does not know is refused."""
    value = load_object(payload, "content")
    if value.keys() != ModelManifest.__dataclass_fields__.keys():
        raise ManifestError("the manifest has other fields than it should")
    if type(value["format"]) is not int or value["format"] != FORMAT:
        shown = repr(value["format"])[:80]
        raise ManifestError(f"the manifest is of format {shown}, and this version reads format {FORMAT}")
    manifest = ModelManifest(
        key=field_of(value, "key", str, is_digest),
        factors=factors_of(field_of(value, "factors", dict)),
        identity=_identity(field_of(value, "identity", dict)),
        checkpoint=field_of(value, "checkpoint", str, is_digest),
        files=_files(field_of(value, "files", dict)),
        weights=blob_of("weights", value["weights"]),
        chunks=_chunks(field_of(value, "chunks", list)),
        created=field_of(value, "created", str, is_utc),
        builder=field_of(value, "builder", str, is_version),
    )
    if artifact_key(manifest.factors) != manifest.key:
        raise ManifestError("the manifest's key is not that of its factors")
    if not 0 < manifest.weights.size <= MAX_TOTAL_BYTES:
        raise ManifestError(f"the manifest's weights have {manifest.weights.size} bytes, which is not sensible")
    if len(manifest.chunks) != -(-manifest.weights.size // CHUNK_BYTES):
        raise ManifestError("the manifest has another number of chunks than its weights have")
    return manifest


def _identity(value: Mapping[str, Any]) -> Mapping[str, str]:
    texts = [*value, *value.values()]
    if not 1 <= len(value) <= _MAX_OBJECTS or not all(
        isinstance(text, str) and _IDENTITY_NAME.fullmatch(text) for text in texts
    ):
        raise ManifestError("the manifest's identity is not that of a source")
    return value


def _files(value: Mapping[str, Any]) -> Mapping[str, Blob]:
    """Names of a flat folder, none of them hidden: they are written under these."""
    if not 1 <= len(value) <= _MAX_FILES:
        raise ManifestError(f"the manifest has {len(value)} files; 1 to {_MAX_FILES} are allowed")
    if "config.json" not in value:
        raise ManifestError("the manifest names no config.json")
    for name in value:
        if not _FILE_NAME.fullmatch(name):
            raise ManifestError(f"the manifest names a file {name[:80]!r}, which is not a safe name")
    files = {name: blob_of(name, blob) for name, blob in value.items()}
    if sum(blob.size for blob in files.values()) > MAX_FILES_BYTES:
        raise ManifestError("the manifest's files are larger than is sensible")
    return files


def _chunks(value: list[Any]) -> tuple[str, ...]:
    if not all(is_digest(each) for each in value):
        raise ManifestError("the manifest's chunks are not digests")
    return tuple(value)
