"""Defines the signed manifest of artifacts: named files by digest, and the factors that they were made from.

A manifest describes an artifact set, which is packages for one key, or a model: the small files of a checkpoint
and its prepared weights, which are fetched by chunks.

A manifest is sealed in an envelope, which is signed if there is a key. The envelope's format is DSSE
(https://github.com/secure-systems-lab/dsse): the signature covers the type and the exact bytes of the payload, and
is verified before the payload is parsed. ``payloadDigest`` is an addition of snapcap: it distinguishes damage from
an untrusted signature, and protects unsigned manifests in a folder against damage.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, cast

from snapcap.models import json_object
from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.key import FORMAT, FactorError, Factors, artifact_key, canonical_json, check_factors
from snapcap.warmup.artifacts.signing import Signature, Signer, Trust
from snapcap.warmup.machine.files import open_regular
from snapcap.warmup.options import Kind
from snapcap.warmup.version import snapcap_version

PAYLOAD_TYPE = "application/vnd.snapcap.manifest+json"
MAX_ENVELOPE_BYTES = 4 * 1024 * 1024
MAX_TOTAL_BYTES = 32 * 1024**3
MAX_ENTRIES = 4096
CHUNK_BYTES = 16 * 1024 * 1024
MAX_SMALL_BYTES = 64 * 1024 * 1024  # all small files of a model together: tokenizers have up to 20 MB

# Entries of a set other than packages.
CPU_LIBRARY = "aot/cpu_library.so"  # packages run on it where torch's libraries are not loaded
IMAGE_LIBRARY = "aot/image_library.so"  # the library that resizes pictures (`models/processing/resample.py`)
LIBRARIES = (CPU_LIBRARY, IMAGE_LIBRARY)

_MAX_SIGNATURES = 16
_CLOCKS_DIFFER = timedelta(days=1)  # the most that a builder's clock may be ahead of a server's
_MAX_SMALL_FILES = 32
_MAX_OBJECTS = 1024  # objects of a source, shards included
_MAX_NAME = 200
SAFE_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*(/[a-z0-9_][a-z0-9_.-]*)*")
# Small files are written under these names into a flat folder; none is hidden.
_SMALL_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_IDENTITY_NAME = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

ManifestKind = Kind | Literal["model"]


class ManifestError(ValueError):
    """Says in one line how an envelope or manifest is damaged."""


class UntrustedError(ManifestError):
    """Refuses an envelope without a signature by a trusted key, or with artifacts that are too old."""


@dataclass(frozen=True)
class Blob:
    """Identifies the content of a file: SHA-256 in hex, and size in bytes."""

    digest: str
    size: int


class ChangedError(OSError):
    """Says that a file's content has changed since it was verified."""


@dataclass(frozen=True)
class VerifiedFile:
    """Names a file and its verified content. The file is used only while it has this content."""

    path: Path
    blob: Blob

    @classmethod
    def of(cls, path: Path) -> "VerifiedFile":
        """Takes a file with its present content. Raises OSError if it cannot be read."""
        return cls(path, describe(path))

    def read(self) -> bytes:
        """Returns the content. The returned bytes are verified again, because the file may have changed. Raises
        ChangedError if the content has changed, and OSError if the file cannot be read."""
        with open_regular(self.path) as file:
            data = file.read(self.blob.size + 1)
        if Blob(hashlib.sha256(data).hexdigest(), len(data)) != self.blob:
            raise ChangedError(f"{self.path.name} has changed since it was verified")
        return data


def describe(path: Path) -> Blob:
    """Returns the digest and size of a file. Raises OSError if it cannot be read."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return Blob(digest.hexdigest(), file.tell())


def describe_all(files: Mapping[str, Path]) -> dict[str, Blob]:
    """Returns the digest and size of each file by name. Raises OSError if a file cannot be read."""
    return {name: describe(path) for name, path in files.items()}


@dataclass(frozen=True)
class Weights:
    """Describes the prepared weights of a model.

    file: the file of prepared weights. chunks: SHA-256, in hex, of each ``CHUNK_BYTES`` of it.
    checkpoint: SHA-256, in hex, of the checkpoint's weights as ``weights.find.content_digest`` takes it.
    identity: the source's revision at that time: ETag and size of each object, or the commit."""

    file: Blob
    chunks: tuple[str, ...]
    checkpoint: str
    identity: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.file.size

    @property
    def content(self) -> str:
        """SHA-256, in hex, of the weights' size and chunk digests, which a download in chunks verifies.

        No download compares ``file.digest`` with the fetched bytes, so that digest does not identify a fetched
        file."""
        verified = {"size": self.size, "chunk": CHUNK_BYTES, "digests": list(self.chunks)}
        return hashlib.sha256(canonical_json(verified)).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """Describes an artifact set or a model.

    factors: the inputs of the build; ``key`` is their ``artifact_key``.
    entries: content by relative file name, with ``/``. A model's entries are the checkpoint's files except weights.
    created: ISO 8601, UTC. builder: the snapcap version.
    metadata: any JSON that the backend needs to use the files, such as the shapes each package expects.
    weights: a model's weights; None for an artifact set."""

    key: str
    factors: Factors
    kind: ManifestKind
    entries: Mapping[str, Blob]
    created: str
    builder: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT
    weights: Weights | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all distinct blobs of the entries."""
        return sum({blob.digest: blob.size for blob in self.entries.values()}.values())

    @property
    def model_weights(self) -> Weights:
        """The weights of a model. Raises ManifestError if the manifest is that of an artifact set."""
        if self.weights is None:
            raise ManifestError("the manifest is not that of a model")
        return self.weights


def new_manifest(
    kind: ManifestKind,
    factors: Factors,
    entries: Mapping[str, Blob],
    metadata: Mapping[str, Any] | None = None,
    weights: Weights | None = None,
) -> Manifest:
    """Returns the manifest of files that this version has just made. Arguments as in ``Manifest``."""
    return Manifest(
        key=artifact_key(factors),
        factors=dict(factors),
        kind=kind,
        entries=dict(entries),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        builder=snapcap_version(),
        metadata=dict(metadata or {}),
        weights=weights,
    )


def seal(manifest: Manifest, signer: Signer | None) -> bytes:
    """Returns the envelope of a manifest, signed if there is a signer. Raises ManifestError if ``open_envelope``
    would refuse the manifest."""
    try:
        payload = canonical_json(asdict(manifest))
    except (TypeError, ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest's metadata is not JSON: {error}") from error
    _parse_payload(payload)
    return seal_payload(payload, signer)


def open_envelope(data: bytes, trust: Trust, key: str | None = None) -> Manifest:
    """Verify an envelope, then parse the bytes that were verified. Raises UntrustedError if ``trust`` requires a
    trusted signature and there is none, or the artifacts are too old, and ManifestError if the bytes are damaged,
    no manifest, of another format, or for another key.

    Args:
        key: the key that the manifest must have; None accepts any key.
    """
    payload, signatures = _parse_envelope(data)
    if not trust.allow_unsigned and trust.signer_of(_pre_authentication(payload), signatures) is None:
        _refuse(signatures, trust)
    try:
        manifest = _parse_payload(payload)
    except RecursionError:
        raise ManifestError("the manifest's content is nested too deeply") from None
    if key is not None and manifest.key != key:  # signed, but for something else
        raise ManifestError(f"the manifest under key {key[:12]} is that of key {manifest.key[:12]}")
    if trust.min_built:
        _check_age(manifest.created, trust.min_built)
    return manifest


def _check_age(created: str, min_built: str) -> None:
    """Raises UntrustedError for artifacts built before ``min_built``, or in the future: if a builder's clock was
    once ahead, no later ``min_built`` would refuse its artifacts."""
    built = datetime.fromisoformat(created)
    if built < datetime.fromisoformat(min_built):
        raise UntrustedError(f"the artifacts were built at {created}, before --min-built {min_built}")
    if built - datetime.now(UTC) > _CLOCKS_DIFFER:
        raise UntrustedError(
            f"the artifacts were built at {created}, which is in the future, so --min-built says nothing of them; "
            "set the clock of the machine that built them, or of this one"
        )


def is_digest(text: object) -> bool:
    """Returns whether a text is a SHA-256 in lower-case hex."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def seal_payload(payload: bytes, signer: Signer | None) -> bytes:
    """Returns the envelope of a payload, signed if there is a signer."""
    signatures = []
    if signer:
        signature = signer.sign(_pre_authentication(payload))
        signatures.append({"keyid": signature.key_id, "sig": base64.b64encode(signature.value).decode()})
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "payloadDigest": hashlib.sha256(payload).hexdigest(),
        "signatures": signatures,
    }
    return canonical_json(envelope)


def _parse_payload(payload: bytes) -> Manifest:
    """Parses a manifest. Raises ManifestError for any field or format that this version does not know."""
    value = _load_object(payload, "content")
    version = value.get("format")
    if version != FORMAT or isinstance(version, bool):
        shown = repr(version)[:80]
        raise ManifestError(f"the manifest is of format {shown}, and this version reads format {FORMAT}")
    value = {"weights": None, **value}  # earlier versions wrote no such field; their manifests explain a miss
    if value.keys() != Manifest.__dataclass_fields__.keys():
        raise ManifestError("the manifest has unknown or missing fields")
    is_model = value["kind"] == "model"
    if not is_model and value["weights"] is not None:
        raise ManifestError("the manifest of a set has weights")
    entries = _field(value, "entries", dict)
    manifest = Manifest(
        key=_field(value, "key", str, is_digest),
        factors=_factors(_field(value, "factors", dict)),
        kind=cast("ManifestKind", _field(value, "kind", str, ("aot", "jit", "model").__contains__)),
        entries=_small_files(entries) if is_model else _entries(entries),
        created=_field(value, "created", str, _is_utc),
        builder=_field(value, "builder", str, lambda text: 0 < len(text) <= 100 and text.isprintable()),
        metadata=_field(value, "metadata", dict),
        weights=_weights(_field(value, "weights", dict)) if is_model else None,
    )
    if artifact_key(manifest.factors) != manifest.key:
        raise ManifestError("the manifest's key is not that of its factors")
    if manifest.factors.get("kind", manifest.kind) != manifest.kind:
        raise ManifestError("the manifest's factors are of another kind than the manifest")
    return manifest


def _entries(value: Mapping[str, Any]) -> dict[str, Blob]:
    """Parses the files of an artifact set, whose names are safe relative paths. Raises ManifestError."""
    if not value or len(value) > MAX_ENTRIES:
        raise ManifestError(f"the manifest has {len(value)} files; 1 to {MAX_ENTRIES} are allowed")
    entries = _blobs(value, lambda name: len(name) <= _MAX_NAME and SAFE_NAME.fullmatch(name) is not None)
    _check_total(sum({blob.digest: blob.size for blob in entries.values()}.values()), MAX_TOTAL_BYTES)
    return entries


def _small_files(value: Mapping[str, Any]) -> dict[str, Blob]:
    """Parses a model's small files, which are written into a flat folder. Raises ManifestError."""
    if not 1 <= len(value) <= _MAX_SMALL_FILES:
        raise ManifestError(f"the manifest has {len(value)} files; 1 to {_MAX_SMALL_FILES} are allowed")
    if "config.json" not in value:
        raise ManifestError("the manifest names no config.json")
    files = _blobs(value, lambda name: _SMALL_FILE_NAME.fullmatch(name) is not None)
    _check_total(sum(blob.size for blob in files.values()), MAX_SMALL_BYTES)  # two names are two files
    return files


def _blobs(value: Mapping[str, Any], is_safe: Callable[[str], bool]) -> dict[str, Blob]:
    for name in value:
        if not is_safe(name):
            raise ManifestError(f"the manifest names a file {name[:80]!r}, which is not a safe name")
    return {name: _blob(name, blob) for name, blob in value.items()}


def _check_total(total: int, most: int) -> None:
    if total > most:
        raise ManifestError(f"the manifest's files have {total} bytes, more than is sensible")


def _blob(name: str, value: Any) -> Blob:
    """Parses the digest and size of the file of this name. Raises ManifestError."""
    match value:
        case {"digest": digest, "size": int(size)} if len(value) == 2 and is_digest(digest):
            if not isinstance(size, bool) and 0 <= size <= MAX_TOTAL_BYTES:
                return Blob(digest, size)
    raise ManifestError(f"the manifest has no valid digest and size for {name}")


def _weights(value: Mapping[str, Any]) -> Weights:
    if value.keys() != Weights.__dataclass_fields__.keys():
        raise ManifestError("the manifest has unknown or missing fields of its weights")
    weights = Weights(
        file=_blob("weights", value["file"]),
        chunks=tuple(_field(value, "chunks", list, lambda chunks: all(map(is_digest, chunks)))),
        checkpoint=_field(value, "checkpoint", str, is_digest),
        identity=_field(value, "identity", dict, _is_identity),
    )
    if not 0 < weights.size <= MAX_TOTAL_BYTES:
        raise ManifestError(f"the manifest's weights have {weights.size} bytes, which is not sensible")
    if len(weights.chunks) != -(-weights.size // CHUNK_BYTES):
        raise ManifestError("the manifest's number of chunks does not fit the size of its weights")
    return weights


def _is_identity(value: Mapping[str, Any]) -> bool:
    texts = [*value, *value.values()]
    return 1 <= len(value) <= _MAX_OBJECTS and all(
        isinstance(text, str) and _IDENTITY_NAME.fullmatch(text) for text in texts
    )


def _field(value: Mapping[str, Any], name: str, kind: type, valid: Callable[[Any], bool] | None = None) -> Any:
    """Returns a field of a payload. Raises ManifestError if it has another type, or is not valid."""
    item = value[name]
    if not isinstance(item, kind) or (valid is not None and not valid(item)):
        raise ManifestError(f"the manifest's {name} is not valid: {str(item)[:80]!r}")
    return item


def _factors(value: Mapping[str, object]) -> Factors:
    try:
        return check_factors(value)
    except FactorError as error:
        raise ManifestError(f"the manifest's factors are not valid: {str(error)[:300]}") from error


def _is_utc(text: str) -> bool:
    """Returns whether a text is a moment in ISO 8601, UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return False
    offset = moment.utcoffset()
    return offset is not None and not offset


def _load_object(data: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object without duplicate names. ``what`` names it in errors. Raises ManifestError."""
    try:
        return json_object.load_object(data)
    except ValueError as error:
        raise ManifestError(f"the manifest's {what} {error}") from None


def _parse_envelope(data: bytes) -> tuple[bytes, list[Signature]]:
    if len(data) > MAX_ENVELOPE_BYTES:
        raise ManifestError(f"the manifest has over {MAX_ENVELOPE_BYTES} bytes, more than is sensible")
    envelope = _load_object(data, "envelope")
    if envelope.keys() != {"payload", "payloadType", "payloadDigest", "signatures"}:
        raise ManifestError("the manifest's envelope has unknown or missing fields")
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise ManifestError("the manifest's envelope is of another type")
    payload = _decode(envelope["payload"])
    if hashlib.sha256(payload).hexdigest() != envelope["payloadDigest"]:
        raise ManifestError("the manifest does not fit its own checksum")
    entries = envelope["signatures"]
    if not isinstance(entries, list) or len(entries) > _MAX_SIGNATURES:
        raise ManifestError("the manifest's signatures are not a short list")
    return payload, [_signature(entry) for entry in entries]


def _signature(entry: Any) -> Signature:
    match entry:
        case {"keyid": str(key_id), "sig": str(encoded)} if len(entry) == 2:
            return Signature(key_id, _decode(encoded))
    raise ManifestError("the manifest has a signature without key id and value")


def _refuse(signatures: list[Signature], trust: Trust) -> None:
    """Raises ManifestError or UntrustedError with the reason why no signature was accepted."""
    if not signatures:
        raise UntrustedError("the manifest is not signed; build with --sign-key")
    names = ", ".join(repr(signature.key_id[:16]) for signature in signatures)  # untrusted text: quoted and cut
    if {signature.key_id for signature in signatures} & {key.key_id for key in trust.keys}:
        raise ManifestError(f"the manifest's signature by {names} is not that of its content")
    raise UntrustedError(f"the manifest is signed by {names}, which is no trusted key; see --trusted-key")


def _decode(text: object) -> bytes:
    """Decodes canonical base64, so that every flipped bit is noticed. Raises ManifestError for any other text."""
    try:
        data = base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError):
        raise ManifestError("the manifest's envelope is not base64") from None
    if base64.b64encode(data).decode() != text:
        raise ManifestError("the manifest's envelope is not canonical base64")
    return data


def _pre_authentication(payload: bytes) -> bytes:
    """Returns the signed bytes, DSSE's PAE: they include the type, so no payload passes for one of another type."""
    encoded = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(encoded), encoded, len(payload), payload)
