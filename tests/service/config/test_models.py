"""Settings name the models of a server, with options of their own, and every mistake is one line."""

import argparse
from pathlib import Path

import pytest

from snapcap.service.config.models import MOST_MODELS, models_of, preloaded
from snapcap.service.config.reader import SettingsError, add_arguments, read_settings
from snapcap.service.config.settings import GROUPS, Settings


def read(*argv: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, GROUPS)
    return read_settings(parser.parse_args(argv), {})


def sources(settings: Settings) -> dict[str, str]:
    return {name: each.model.source for name, each in models_of(settings).items()}


def test_one_model_is_no_several() -> None:
    for argv in ((), ("--model", "org/name"), ("--model", "s3://bucket/key=value/model"), ("--model", "a,b")):
        assert models_of(read(*argv)) == {}


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kind=demo").mkdir()
    assert models_of(read("--model", "kind=demo")) == {}


def test_models_have_names_in_order() -> None:
    settings = read("--model", "llava:7b=org/b", "--model", "a=./a=1", "--model", "org/c=s3://c/d=1")
    assert sources(settings) == {"llava:7b": "org/b", "a": "./a=1", "org/c": "s3://c/d=1"}
    assert [each.http.model_name for each in models_of(settings).values()] == ["llava:7b", "a", "org/c"]


def test_one_model_that_may_leave_has_the_name_that_it_has_today() -> None:
    assert sources(read("--idle-unload", "5")) == {"demo": "demo"}
    assert sources(read("--idle-unload", "5", "--model", "s3://bucket/m", "--model-name", "m")) == {
        "m": "s3://bucket/m"
    }


def test_a_file_has_options_for_each_model(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[a]\nmodel = "demo"\nbuckets = [1, 4]\nmax_new_tokens = 2\n["org/b"]\nmodel = "./b"\n')
    settings = read("--models", str(file), "--max-new-tokens", "9", "--model", "c=./c")
    found = models_of(settings)
    assert list(found) == ["c", "a", "org/b"]
    assert (found["a"].compute.buckets, found["a"].model.max_new_tokens) == ((1, 4), 2)
    assert (found["org/b"].compute.buckets, found["org/b"].model.max_new_tokens) == ((), 9)


def test_a_file_may_begin_with_the_mark_of_an_editor_on_windows(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_bytes(b'\xef\xbb\xbf[a]\r\nmodel = "demo"\r\n')
    assert sources(read("--models", str(file))) == {"a": "demo"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no model"),
        ("[a]\n", "must be a table such as"),
        ("a = 1\n", "must be a table such as"),
        ("[a\n", "is no TOML file"),
        pytest.param('[a]\nmodel = "demo"\nthreads = ' + "9" * 5000, "is no TOML file", id="digits"),
        ('["../a"]\nmodel = "demo"\n', "name '../a' must be a name of letters"),
        ('[a]\nmodel = "demo"\nbucket = 1\n', "unknown option bucket of the model 'a'; did you mean buckets"),
        ('[a]\nmodel = "demo"\nport = 1\n', "unknown option port"),
        ('[a]\nmodel = "demo"\nbuckets = "x"\n', "buckets of the model 'a' must"),
        ('[a]\nmodel = "demo"\ncache_dir = "x"\n', "unknown option cache_dir"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says) as told:
        models_of(read("--models", str(file)))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--model", "a=x", "--model", "a=y"), "has a name twice"),
        (("--model", "a=x", "--model", "y"), "must be NAME=MODEL"),
        (("--model", "é=x", "--model", "b=y"), "the name 'é' must be a name of letters"),
        (("--model", "a//b=x"), "the name 'a//b' must be a name of letters"),
        (("--model", "y", "--model", "b=x"), "must be NAME=MODEL"),
        (
            (
                "--model",
                "a=",
            ),
            "must be NAME=MODEL",
        ),
        (("--model", "a=x", "--model", "b=y", "--model-name", "m"), "names one model"),
        (("--model", "a=x", "--preload", "b"), "there is no model 'b'"),
        (("--models", "/nowhere/models.toml"), "cannot be read: No such file"),
        (("--models", "x.toml", "--model", "org/name"), "must be NAME=MODEL beside --models"),
        (
            tuple(word for index in range(MOST_MODELS + 1) for word in ("--model", f"m{index}=x")),
            "at most 64",
        ),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(argv: tuple[str, ...], says: str) -> None:
    with pytest.raises(SettingsError, match=says) as told:
        models_of(read(*argv))
    assert "\n" not in str(told.value)


def test_which_models_must_be_ready_before_ready() -> None:
    def names(*argv: str) -> list[str]:
        settings = read("--model", "a=x", "--model", "b=y", *argv)
        return preloaded(settings, models_of(settings))

    assert names() == ["a", "b"]
    assert names("--idle-unload", "5") == []
    assert names("--idle-unload", "5", "--preload", "all") == ["a", "b"]
    assert names("--preload", "none") == []
    assert names("--preload", "b") == ["b"]
