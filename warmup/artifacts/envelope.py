"""Seals a manifest in an envelope, signed where there is a key, and opens an envelope that is trusted.

The envelope's format is DSSE (https://github.com/secure-systems-lab/dsse): the signature covers the type and the
exact bytes of the payload, and is checked before those bytes are parsed. ``payloadDigest`` is an addition of ours:
it tells damage from a stranger's work, and guards a folder's unsigned manifests against damage too.
"""

import base64
import binascii
import hashlib
from datetime import datetime
from typing import Any

from snapcap.models import json_object
from snapcap.warmup.artifacts.key import canonical_json
from snapcap.warmup.artifacts.signing import Signature, Signer, Trust

PAYLOAD_TYPE = "application/vnd.snapcap.manifest+json"
MAX_ENVELOPE_BYTES = 4 * 1024 * 1024
_MAX_SIGNATURES = 16


class ManifestError(ValueError):
    """An envelope or manifest that is damaged; one line that says how."""


class UntrustedError(ManifestError):
    """An envelope that nobody trusted has signed."""


def seal_payload(payload: bytes, signer: Signer | None, kind: str = PAYLOAD_TYPE) -> bytes:
    """The envelope of a payload of this type, signed if there is a signer."""
    signatures = []
    if signer:
        signature = signer.sign(_pre_authentication(payload, kind))
        signatures.append({"keyid": signature.key_id, "sig": base64.b64encode(signature.value).decode()})
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": kind,
        "payloadDigest": hashlib.sha256(payload).hexdigest(),
        "signatures": signatures,
    }
    return canonical_json(envelope)


def open_payload(data: bytes, trust: Trust, kind: str = PAYLOAD_TYPE) -> bytes:
    """The payload of an envelope of this type, once it is known whose it is.

    Raises:
        UntrustedError: there is no signature by a trusted key, and ``trust`` demands one.
        ManifestError: the envelope is damaged.
    """
    payload, signatures = _parse(data, kind)
    if not trust.allow_unsigned and trust.signer_of(_pre_authentication(payload, kind), signatures) is None:
        _refuse(signatures, trust)
    return payload


def check_age(created: str, trust: Trust) -> None:
    """Compare a manifest's build time with what is trusted.

    Args:
        created: ISO 8601, UTC.

    Raises:
        UntrustedError: the artifacts are older than ``trust`` allows.
    """
    if trust.min_built and datetime.fromisoformat(created) < datetime.fromisoformat(trust.min_built):
        raise UntrustedError(f"the artifacts were built at {created}, before --min-built {trust.min_built}")


def load_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object that has one meaning; ``what`` names it.

    Raises:
        ManifestError: it is none.
    """
    try:
        return json_object.load_object(data)
    except ValueError as error:
        raise ManifestError(f"the manifest's {what} {error}") from None


def _parse(data: bytes, kind: str) -> tuple[bytes, list[Signature]]:
    if len(data) > MAX_ENVELOPE_BYTES:
        raise ManifestError(f"the manifest has over {MAX_ENVELOPE_BYTES} bytes, more than is sensible")
    envelope = load_object(data, "envelope")
    if envelope.keys() != {"payload", "payloadType", "payloadDigest", "signatures"}:
        raise ManifestError("the manifest's envelope has other fields than it should")
    if envelope["payloadType"] != kind:
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
    """Say which of the reasons it is."""
    if not signatures:
        raise UntrustedError("the manifest is not signed; build with --sign-key")
    names = ", ".join(repr(signature.key_id[:16]) for signature in signatures)  # theirs, so not as it comes
    if {signature.key_id for signature in signatures} & {key.key_id for key in trust.keys}:
        raise ManifestError(f"the manifest's signature by {names} is not that of its content")
    raise UntrustedError(f"the manifest is signed by {names}, which is no trusted key; see --trusted-key")


def _decode(text: object) -> bytes:
    """Base64 in its one canonical spelling, so that every flipped bit shows."""
    try:
        data = base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError):
        raise ManifestError("the manifest's envelope is not base64") from None
    if base64.b64encode(data).decode() != text:
        raise ManifestError("the manifest's envelope is not canonical base64")
    return data


def _pre_authentication(payload: bytes, kind: str) -> bytes:
    """DSSE's PAE: what is signed, so that no payload can be read as one of another type."""
    encoded = kind.encode()
    return b"DSSEv1 %d %b %d %b" % (len(encoded), encoded, len(payload), payload)
