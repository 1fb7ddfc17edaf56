"""One declaration of an option serves the command line, the environment, the help, the table and the start."""

import argparse
import dataclasses
from pathlib import Path

import pytest
from support.documents import tables

from snapcap.models.dataclass import dataclass
from snapcap.service.cli.main import main
from snapcap.service.config import reader
from snapcap.service.config.settings import GROUPS, Settings
from snapcap.warmup.artifacts.remote import trust_of
from snapcap.warmup.option import option, options_of, parse_int
from snapcap.warmup.options import ComputeOptions, StartOptions, StoreOptions


def test_settings_are_start_options_with_the_groups_of_the_service() -> None:
    groups = {group.name: group.default_factory for group in dataclasses.fields(Settings) if group.name != "tested"}
    assert groups == GROUPS
    shared = [group for group in dataclasses.fields(StartOptions) if group.name != "tested"]
    assert all(issubclass(GROUPS[group.name], group.default_factory) for group in shared)


def test_no_option_is_declared_twice() -> None:
    """A group of the service has the fields of the warm-up's by inheritance, not by writing them again."""
    classes = {each for group in GROUPS.values() for each in group.__mro__ if dataclasses.is_dataclass(each)}
    declared = [options_of(each)[field].name for each in classes for field in vars(each)["__annotations__"]]
    assert sorted(declared) == sorted(set(declared))


def test_a_new_option_of_the_warm_up_is_one_field(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class More(ComputeOptions):
        """Where and how the model runs."""

        streams: int = option(1, "streams of the device", parse=parse_int(1, 8), metavar="N")

    monkeypatch.setitem(GROUPS, "compute", More)
    parser = argparse.ArgumentParser()
    reader.add_arguments(parser, GROUPS)
    assert "streams of the device [default: 1; SNAPCAP_STREAMS]" in parser.format_help()
    assert "| `--streams N` | `SNAPCAP_STREAMS` | 1 | streams of the device |" in tables.server_options()

    def streams(*arguments: str, **environ: str) -> int:
        start: StartOptions = reader.read_settings(parser.parse_args(arguments), environ)
        assert isinstance(start.compute, More)
        return start.compute.streams

    assert (streams(), streams("--streams=2"), streams(SNAPCAP_STREAMS="3")) == (1, 2, 3)


def test_who_signs_accepts_what_he_has_signed(tmp_path: Path) -> None:
    """`snapcap build --store s3://… --sign-key KEY` looks into the store as well; it must not be refused there."""
    key = tmp_path / "artifacts.key"
    assert main(["keygen", str(key)]) == 0
    store = StoreOptions("s3://bucket/snapcap", sign_key=key)
    assert store.accepted_keys == (tmp_path / "artifacts.key.pub",)
    assert not trust_of(store).nobody


def test_trusted_keys_that_are_named_are_the_only_ones(tmp_path: Path) -> None:
    key, other = tmp_path / "artifacts.key", tmp_path / "other.pub"
    assert main(["keygen", str(key)]) == 0
    assert StoreOptions("s3://bucket/snapcap", (other,), sign_key=key).accepted_keys == (other,)


def test_a_private_key_alone_vouches_for_nobody(tmp_path: Path) -> None:
    assert StoreOptions("s3://bucket/snapcap", sign_key=tmp_path / "alone.key").accepted_keys == ()
