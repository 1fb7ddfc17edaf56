"""The file of keys: what counts as a key, what stops the start, and what is warned of."""

import logging
from pathlib import Path

import pytest

from snapcap.service.config.reader import SettingsError
from snapcap.service.http.access import ApiKeys, read_api_keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.touch(0o600)
    return file


def test_one_key_a_line_and_comments(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("# first\r\nalpha-1\r\n\n   # second\n  beta/2==  \n")
    with caplog.at_level(logging.WARNING, "snapcap.server"):
        keys = read_api_keys(file)
    assert [key for key in (b"alpha-1", b"beta/2==", b"alpha", b"", b"# first") if keys.accept(key)] == [
        b"alpha-1",
        b"beta/2==",
    ]
    assert caplog.records == []


def test_a_file_that_everybody_may_read_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("alpha-1")
    file.chmod(0o604)
    with caplog.at_level(logging.WARNING, "snapcap.server"):
        read_api_keys(file)
    assert "everybody may read the API keys" in caplog.text
    assert "alpha-1" not in caplog.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no key"),
        (b"# only\n\n", "has no key"),
        (b"good\ntwo words\n", "line 2 is not a key"),
        (b"good\nk\xc3\xa9y\n", "line 2 is not a key"),
        (b"=leading\n", "line 1 is not a key"),
        (b"\xff\xfe\x00", "it is not text"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start(file: Path, content: bytes, says: str) -> None:
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=says) as failed:
        read_api_keys(file)
    assert "\n" not in str(failed.value)
    assert "words" not in str(failed.value)  # what is in the file stays there


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_api_keys(tmp_path / "none")
    with pytest.raises(SettingsError, match="directory"):
        read_api_keys(tmp_path)


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one == other)
        return one == other

    monkeypatch.setattr("snapcap.service.http.access.hmac.compare_digest", compare)
    keys = ApiKeys(["a", "b", "c"])
    assert keys.accept(b"a")
    assert compared == [True, False, False]
