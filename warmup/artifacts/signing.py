"""Signs and verifies with Ed25519 keys, and names the keys whose artifacts may be loaded.

``cryptography`` is imported by the functions that need it.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.options import StoreOptions

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


class KeyFileError(ValueError):
    """Names in one line a key file that cannot be used, and says what to do."""


@dataclass(frozen=True)
class Signature:
    """Holds an Ed25519 signature (64 bytes) and the claimed name of its key."""

    key_id: str
    value: bytes


@dataclass(frozen=True)
class Signer:
    """Signs with a private key."""

    key_id: str
    key: "Ed25519PrivateKey"

    def sign(self, message: bytes) -> Signature:
        return Signature(self.key_id, self.key.sign(message))


@dataclass(frozen=True)
class TrustedKey:
    """Verifies with a public key. Artifacts that its private key signed may run here."""

    key_id: str
    key: "Ed25519PublicKey"

    def verifies(self, message: bytes, signature: Signature) -> bool:
        """Returns whether this key made the signature. The key name in the signature is ignored."""
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

        try:
            self.key.verify(signature.value, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class Trust:
    """Names the signers whose artifacts may be loaded. Loading an artifact runs its code: by default none may be.

    allow_unsigned: accepts artifacts of anybody who can write to the store, unsigned or signed by an unknown key.
    min_built: moment in ISO 8601, UTC. Artifacts built before it are refused, whoever signed them. Empty: no limit.
    """

    keys: tuple[TrustedKey, ...] = ()
    allow_unsigned: bool = False
    min_built: str = ""

    @classmethod
    def of(cls, options: StoreOptions) -> "Trust":
        """Reads the public keys of the options. Raises KeyFileError if a file is missing or is no such key."""
        keys = tuple(load_public_key(path) for path in options.accepted_keys)
        return cls(keys, options.allow_unsigned, options.min_built)

    @property
    def nobody(self) -> bool:
        """True if no artifact can be accepted."""
        return not self.keys and not self.allow_unsigned

    @property
    def of_owner(self) -> "Trust":
        """Returns the trust in local builds of the folder's owner, which need no signature."""
        return replace(self, keys=(), allow_unsigned=True)

    @property
    def owner_suffices(self) -> bool:
        """True if every artifact in a folder is trusted when only its owner can write to the folder."""
        return self.allow_unsigned or not self.keys

    def signer_of(self, message: bytes, signatures: Iterable[Signature]) -> TrustedKey | None:
        """Returns the trusted key that made one of the signatures, or None."""
        for signature in signatures:
            for key in self.keys:
                if key.verifies(message, signature):
                    return key
        return None


OWNER = Trust(allow_unsigned=True)
"""Trust in every artifact of a folder that only its owner can write to."""


def generate_key(private: Path) -> Path:
    """Write a new private key (PEM, mode 0600) and beside it the public key, ``<private>.pub``, whose path is
    returned. Raises KeyFileError if one of the files exists, or cannot be written."""
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    key = Ed25519PrivateKey.generate()
    public = Path(f"{private}.pub")
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    _create(public, shown, 0o644)
    try:
        _create(private, secret, 0o600)
    except KeyFileError:
        public.unlink()
        raise
    return public


def load_signer(path: Path) -> Signer:
    """Read a private key in PEM. Raises KeyFileError if the file is missing, has a password, or is no such key."""
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    data = _read(path)
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        raise KeyFileError(f"{path}: the key has a password; write it without one: openssl pkey -in …") from None
    except (ValueError, UnsupportedAlgorithm):
        raise KeyFileError(f"{path} is no private key in PEM; make one with `snapcap keygen`") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path} is not an Ed25519 key; make one with `snapcap keygen`")
    return Signer(_key_id(key.public_key()), key)


def load_public_key(path: Path) -> TrustedKey:
    """Read a public key in PEM. Raises KeyFileError if the file is missing or holds something else."""
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    data = _read(path)
    if b"PRIVATE KEY" in data:
        raise KeyFileError(f"{path} is a private key; a server needs the public one, {path.name}.pub, and no other")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise KeyFileError(f"{path} is no public key in PEM; `snapcap keygen` writes one ending in .pub") from None
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFileError(f"{path} is not an Ed25519 key; make one with `snapcap keygen`")
    return TrustedKey(_key_id(key), key)


def _key_id(key: "Ed25519PublicKey") -> str:
    """Returns sixteen hex digits of the key's hash. They distinguish keys in a log, and are never trusted."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"cannot read the key {path}: {error.strerror}") from error


def _create(path: Path, data: bytes, mode: int) -> None:
    """Write a new file completely or not at all, and never readable by more users than ``mode`` allows. Raises
    KeyFileError if the file exists or cannot be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise KeyFileError(f"{path} exists; keys are never overwritten, choose another name") from None
    except OSError as error:
        raise KeyFileError(f"cannot write the key {path}: {os_error_text(error)}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)  # a key has no second copy
    except OSError as error:
        path.unlink(missing_ok=True)
        raise KeyFileError(f"cannot write the key {path}: {os_error_text(error)}") from error
