"""Key files and signatures, against keys of the openssl program where that is another implementation."""

import shutil
import subprocess
from pathlib import Path

import pytest

from snapcap.warmup.artifacts.signing import (
    KeyFileError,
    Signature,
    Trust,
    generate_key,
    load_public_key,
    load_signer,
)
from snapcap.warmup.options import StoreOptions


def openssl(*args: str | Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("THE OPENSSL PROGRAM IS NOT INSTALLED")
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


def test_generated_keys_sign_and_verify(tmp_path: Path) -> None:
    private = tmp_path / "build.pem"
    public = generate_key(private)
    assert public == tmp_path / "build.pem.pub"
    assert private.stat().st_mode & 0o777 == 0o600
    signature = load_signer(private).sign(b"message")
    key = load_public_key(public)
    assert signature.key_id == key.key_id
    assert key.verifies(b"message", signature)
    assert not key.verifies(b"massage", signature)
    assert not key.verifies(b"message", Signature(signature.key_id, bytes(64)))
    assert not key.verifies(b"message", Signature(signature.key_id, b"short"))


def test_any_of_several_keys_is_found_whatever_the_signature_claims(tmp_path: Path) -> None:
    publics = [generate_key(tmp_path / name) for name in ("a", "b", "c")]
    trust = Trust.of(StoreOptions(trusted_keys=tuple(publics[:2])))
    by_b, by_c = (load_signer(tmp_path / name).sign(b"m") for name in ("b", "c"))
    found = trust.signer_of(b"m", [by_c, Signature("another name", by_b.value)])
    assert found == trust.keys[1]
    assert trust.signer_of(b"m", [by_c]) is None
    assert trust.signer_of(b"m", [Signature(trust.keys[0].key_id, by_c.value)]) is None
    assert trust.signer_of(b"m", []) is None


def test_trust_without_keys_is_nobody() -> None:
    assert Trust().nobody
    assert not Trust(allow_unsigned=True).nobody


def test_no_key_is_overwritten(tmp_path: Path) -> None:
    private = tmp_path / "build.pem"
    generate_key(private)
    before = private.read_bytes(), private.with_name("build.pem.pub").read_bytes()
    with pytest.raises(KeyFileError, match="exists"):
        generate_key(private)
    private.with_name("build.pem.pub").unlink()
    with pytest.raises(KeyFileError, match="exists"):
        generate_key(private)
    assert private.read_bytes() == before[0]
    assert not private.with_name("build.pem.pub").exists()  # no public key without its private one


def test_keys_of_openssl_are_read(tmp_path: Path) -> None:
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    message = tmp_path / "message"
    message.write_bytes(b"hello")
    signature = tmp_path / "signature"
    openssl("pkeyutl", "-sign", "-rawin", "-inkey", private, "-in", message, "-out", signature)
    assert load_signer(private).sign(b"hello").value == signature.read_bytes()
    assert load_public_key(public).verifies(b"hello", Signature("", signature.read_bytes()))


def test_what_is_no_ed25519_key_is_refused(tmp_path: Path) -> None:
    private, public = tmp_path / "rsa.pem", tmp_path / "rsa.pub"
    openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    with pytest.raises(KeyFileError, match="not an Ed25519 key"):
        load_signer(private)
    with pytest.raises(KeyFileError, match="not an Ed25519 key"):
        load_public_key(public)


def test_a_key_with_a_password_is_refused(tmp_path: Path) -> None:
    plain, locked = tmp_path / "plain", tmp_path / "locked"
    openssl("genpkey", "-algorithm", "ed25519", "-out", plain)
    openssl("pkey", "-in", plain, "-aes256", "-passout", "pass:secret", "-out", locked)
    with pytest.raises(KeyFileError, match="password"):
        load_signer(locked)


def test_mistaken_files_are_named(tmp_path: Path) -> None:
    private = tmp_path / "build.pem"
    public = generate_key(private)
    noise = tmp_path / "noise"
    noise.write_bytes(b"\x00\xff no key")
    with pytest.raises(KeyFileError, match="is a private key"):
        load_public_key(private)
    with pytest.raises(KeyFileError, match="no private key"):
        load_signer(public)
    with pytest.raises(KeyFileError, match="no public key"):
        load_public_key(noise)
    with pytest.raises(KeyFileError, match="No such file"):
        load_signer(tmp_path / "missing")
    with pytest.raises(KeyFileError, match="No such file"):
        generate_key(tmp_path / "missing" / "key")


def test_the_working_directory_in_place_of_a_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyFileError, match="exists; keys are never overwritten"):
        generate_key(Path())
    assert list(tmp_path.iterdir()) == []
    assert StoreOptions(sign_key=Path()).accepted_keys == ()
    with pytest.raises(KeyFileError, match="Is a directory"):
        load_signer(Path())
