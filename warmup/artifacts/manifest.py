"""Defines what an artifact set is made of: named files by digest, and the factors they were built from."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, field
from datetime import datetime
from typing import Any, cast

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.envelope import (
    ManifestError,
    check_age,
    load_object,
    open_payload,
    seal_payload,
)
from snapcap.warmup.artifacts.key import FactorError, Factors, artifact_key, canonical_json, check_factors
from snapcap.warmup.artifacts.signing import Signer, Trust
from snapcap.warmup.options import Kind

FORMAT = 1
MAX_TOTAL_BYTES = 32 * 1024**3
MAX_ENTRIES = 4096


_ENTRY_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*(/[a-z0-9_][a-z0-9_.-]*)*")
_MAX_NAME = 200
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Blob:
    """The content of one file: SHA-256 in hex, and size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """Describes an artifact set.

    factors: the inputs of the build; ``key`` is their ``artifact_key``.
    entries: relative file name, with ``/``, to content.
    created: ISO 8601, UTC. builder: the snapcap version.
    metadata: any JSON that the backend needs to use the files, such as the shapes each package expects.
    """

    key: str
    factors: Factors
    kind: Kind
    entries: Mapping[str, Blob]
    created: str
    builder: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        """Bytes of all distinct blobs."""
        return sum({blob.digest: blob.size for blob in self.entries.values()}.values())


def seal(manifest: Manifest, signer: Signer | None) -> bytes:
    """The envelope of a manifest, signed if there is a signer.

    Raises:
        ManifestError: the manifest is one that ``open_envelope`` would refuse.
    """
    try:
        payload = canonical_json(asdict(manifest))
    except (TypeError, ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest's metadata is not JSON: {error}") from error
    _parse_payload(payload)
    return seal_payload(payload, signer)


def open_envelope(data: bytes, trust: Trust) -> Manifest:
    """Verify an envelope, then parse the bytes that were verified.

    Raises:
        UntrustedError: there is no signature by a trusted key, and ``trust`` demands one; or it is too old.
        ManifestError: damaged, not a manifest, or not of this format.
    """
    payload = open_payload(data, trust)
    try:
        manifest = _parse_payload(payload)
    except RecursionError:
        raise ManifestError("the manifest's content is nested too deeply") from None
    check_age(manifest.created, trust)
    return manifest


def is_entry_name(name: object) -> bool:
    """Returns whether a name is a safe relative path: lower-case words, no ``..``, no hidden file, no absolute
    path."""
    return isinstance(name, str) and len(name) <= _MAX_NAME and _ENTRY_NAME.fullmatch(name) is not None


def is_digest(text: object) -> bool:
    """Returns whether a text is a SHA-256 in lower-case hex."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def _parse_payload(payload: bytes) -> Manifest:
    """Parses a manifest. Raises ManifestError for any field or format that this version does not know."""
    value = load_object(payload, "content")
    version = value.get("format")
    if version != FORMAT or isinstance(version, bool):
        shown = repr(version)[:80]
        raise ManifestError(f"the manifest is of format {shown}, and this version reads format {FORMAT}")
    if value.keys() != Manifest.__dataclass_fields__.keys():
        raise ManifestError("the manifest has other fields than it should")
    entries = field_of(value, "entries", dict)
    if not entries or len(entries) > MAX_ENTRIES:
        raise ManifestError(f"the manifest has {len(entries)} files; 1 to {MAX_ENTRIES} are allowed")
    manifest = Manifest(
        key=field_of(value, "key", str, is_digest),
        factors=factors_of(field_of(value, "factors", dict)),
        kind=cast("Kind", field_of(value, "kind", str, ("aot", "jit").__contains__)),
        entries={_entry_name(name): blob_of(name, blob) for name, blob in entries.items()},
        created=field_of(value, "created", str, is_utc),
        builder=field_of(value, "builder", str, is_version),
        metadata=field_of(value, "metadata", dict),
    )
    if artifact_key(manifest.factors) != manifest.key:
        raise ManifestError("the manifest's key is not that of its factors")
    if manifest.total_bytes > MAX_TOTAL_BYTES:
        raise ManifestError(f"the manifest's files have {manifest.total_bytes} bytes, more than is sensible")
    return manifest


def field_of(value: Mapping[str, Any], name: str, kind: type, valid: Callable[[Any], bool] | None = None) -> Any:
    """A field of a payload.

    Raises:
        ManifestError: it has another type, or is not valid.
    """
    item = value[name]
    if not isinstance(item, kind) or (valid is not None and not valid(item)):
        raise ManifestError(f"the manifest's {name} is not valid: {str(item)[:80]!r}")
    return item


def factors_of(value: Mapping[str, object]) -> Factors:
    """The factors of a payload. Raises ManifestError."""
    try:
        return check_factors(value)
    except FactorError as error:
        raise ManifestError(f"the manifest's factors are not valid: {str(error)[:300]}") from error


def _entry_name(name: str) -> str:
    if not is_entry_name(name):
        raise ManifestError(f"the manifest names a file {name[:80]!r}, which is not a safe name")
    return name


def blob_of(name: str, value: Any) -> Blob:
    """Digest and size in a payload, of the file of this name. Raises ManifestError."""
    match value:
        case {"digest": digest, "size": int(size)} if len(value) == 2 and is_digest(digest):
            if not isinstance(size, bool) and 0 <= size <= MAX_TOTAL_BYTES:
                return Blob(digest, size)
    raise ManifestError(f"the manifest has no valid digest and size for {name}")


def is_version(text: str) -> bool:
    """Returns whether a text can be a builder's version: 1 to 100 printable characters."""
    return 0 < len(text) <= 100 and text.isprintable()


def is_utc(text: str) -> bool:
    """Returns whether a text is a moment in ISO 8601, UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return False
    offset = moment.utcoffset()
    return offset is not None and not offset
