"""What the settings become for the warm-up."""

from dataclasses import replace
from pathlib import Path

from snapcap.service.cli.keygen import keygen
from snapcap.service.config.settings import Settings
from snapcap.service.config.start_options import start_options
from snapcap.service.config.store_settings import StoreSettings
from snapcap.warmup.store.open import trust_of


def test_who_signs_accepts_what_he_has_signed(tmp_path: Path) -> None:
    """`snapcap build --store s3://… --sign-key KEY` looks into the store as well; it must not be refused there."""
    key = tmp_path / "artifacts.key"
    assert keygen(key) == 0
    store = StoreSettings(address="s3://bucket/snapcap", sign_key=key)
    options = start_options(replace(Settings(), store=store))
    assert options.store.trusted_keys == (tmp_path / "artifacts.key.pub",)
    assert not trust_of(options.store).nobody


def test_trusted_keys_that_are_named_are_the_only_ones(tmp_path: Path) -> None:
    key, other = tmp_path / "artifacts.key", tmp_path / "other.pub"
    assert keygen(key) == 0
    store = StoreSettings(address="s3://bucket/snapcap", sign_key=key, trusted_keys=(other,))
    assert start_options(replace(Settings(), store=store)).store.trusted_keys == (other,)


def test_a_private_key_alone_vouches_for_nobody(tmp_path: Path) -> None:
    store = StoreSettings(address="s3://bucket/snapcap", sign_key=tmp_path / "alone.key")
    assert start_options(replace(Settings(), store=store)).store.trusted_keys == ()
