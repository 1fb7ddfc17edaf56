import argparse
from pathlib import Path

import pytest

from snapcap.service.config.reader import SettingsError, add_arguments, read_settings
from snapcap.service.config.settings import GROUPS, Settings
from snapcap.warmup.option import options_of

ROOT = Path(__file__).parents[3]
CONFIGURATION = ROOT / "docs" / "configuration.md"


def read(*argv: str, **environ: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, GROUPS)
    return read_settings(parser.parse_args(argv), environ)


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert read() == Settings()
    assert Settings().model.source == "demo"
    assert (Settings().http.port, Settings().queue.size, Settings().limits.max_body_bytes) == (8000, 256, 20 << 20)


def test_every_option_has_a_unique_name_and_a_default_that_its_parser_accepts() -> None:
    options = [option for group in GROUPS.values() for option in options_of(group).values()]
    assert len({option.name for option in options}) == len(options)
    for name, group in GROUPS.items():
        for field, option in options_of(group).items():
            default = getattr(getattr(Settings(), name), field)
            if default is None or default == () or option.is_switch:
                continue
            assert option.parse(str(default)) == default, option.name


def test_an_argument_wins_over_its_variable() -> None:
    assert read("--port", "1", SNAPCAP_PORT="2").http.port == 1
    assert read(SNAPCAP_PORT="2").http.port == 2


def test_a_repeatable_option_takes_several_in_either_way() -> None:
    hosts = ("a.example", "b.example:8443", "c.example")
    given = ("--allow-image-host", "A.example,b.example:8443", "--allow-image-host", "c.example")
    assert read(*given).http.image_hosts == hosts
    assert read(SNAPCAP_ALLOW_IMAGE_HOST="a.example, b.example:8443, c.example").http.image_hosts == hosts
    assert read("--model-name", "org/name@1.2").http.model_name == "org/name@1.2"


def test_an_empty_variable_counts_as_unset() -> None:
    assert read(SNAPCAP_PORT="").http.port == 8000
    assert read(SNAPCAP_PORT=" \n").http.port == 8000


@pytest.mark.parametrize(("before", "after"), [(" ", ""), ("", "\n"), ("", "\r"), ("\t", " \r\n")])
def test_white_space_around_a_variable_is_left_out(before: str, after: str) -> None:
    """Files of secrets end with white space, and so do lines of files from Windows."""
    values = {"PORT": "9000", "MODEL": "s3://bucket/x", "BUCKETS": "1, 4,16", "LOG_FORMAT": "json", "STRICT": "on"}
    settings = read(**{f"SNAPCAP_{name}": f"{before}{value}{after}" for name, value in values.items()})
    assert (settings.http.port, settings.model.source) == (9000, "s3://bucket/x")
    assert (settings.compute.buckets, settings.log.format, settings.compute.strict) == ((1, 4, 16), "json", True)


def test_values_are_parsed() -> None:
    settings = read("--buckets=1,4,16", "--strict", "--max-body-bytes=2MiB", "--cache-dir=x/y", "--device=cuda:1")
    assert settings.compute.buckets == (1, 4, 16)
    assert settings.compute.strict
    assert settings.limits.max_body_bytes == 2 << 20
    assert settings.model.cache_dir == Path("x/y")
    assert settings.compute.device == "cuda:1"
    assert read(SNAPCAP_STRICT="yes").compute.strict
    assert not read("--no-strict", SNAPCAP_STRICT="yes").compute.strict


@pytest.mark.parametrize(
    ("text", "sizes"), [("auto", None), ("none", ()), ("24", (24,)), ("24,96, 256", (24, 96, 256))]
)
def test_step_buckets_are_sizes_or_none_or_for_the_device_to_decide(
    text: str, sizes: tuple[int, ...] | None
) -> None:
    assert read(f"--step-buckets={text}").compute.step_buckets == sizes
    assert read().compute.step_buckets is None


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read().model.cache_dir == tmp_path / "snapcap"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert read().model.cache_dir == Path.home() / ".cache" / "snapcap"


def test_a_store_may_be_in_a_home_folder() -> None:
    assert read("--store", "~/artifacts").store_folder == Path.home() / "artifacts"


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--port=99999", "--port must be a whole number from 0 to 65535, not '99999'"),
        ("--port=8_0", "--port must be a whole number"),
        ("--device=gpu", "--device must be auto, cpu, cuda or cuda:N"),
        ("--dtype=float23", "not 'float23'; did you mean float32?"),
        ("--buckets=4,1", "--buckets must be batch sizes in increasing order"),
        ("--buckets=0,1", "--buckets must be batch sizes in increasing order"),
        (
            "--step-buckets=8,4",
            "--step-buckets must be batch sizes in increasing order, such as 1,4,16, or auto, or none",
        ),
        ("--request-timeout=nan", "--request-timeout must be a number of seconds above 0"),
        ("--request-timeout=0", "--request-timeout must be a number of seconds above 0"),
        ("--drain-delay=-1", "--drain-delay must be a number of seconds of at least 0"),
        ("--max-body-bytes=20MB", "--max-body-bytes must be a size in bytes above 0"),
        ("--min-built=yesterday", "--min-built must be a date or a moment such as 2026-11-25"),
        ("--min-built=2026-11-25T14:30+99:00", "--min-built must be a date or a moment"),
        ("--metrics-port=-1", "--metrics-port must be a whole number from 0 to 65535"),
        ("--allow-image-host=https://a.example/", "--allow-image-host must be host names such as"),
        ("--allow-image-host=*.example", "--allow-image-host must be host names such as"),
        ("--allow-image-host=", "--allow-image-host must be host names such as"),
        ("--model-name=s3://bucket/x", "--model-name must be a name of letters, digits"),
        ("--model-name=/srv/x", "--model-name must be a name of letters, digits"),
        ("--model-name=a b", "--model-name must be a name of letters, digits"),
    ],
)
def test_a_bad_argument_is_one_clear_line(argument: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(argument)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(SettingsError, match="SNAPCAP_PORT must be a whole number from 0 to 65535, not 'http'"):
        read(SNAPCAP_PORT="http")


def test_an_unknown_variable_is_named_with_the_closest() -> None:
    with pytest.raises(SettingsError, match=r"SNAPCAP_MODLE; did you mean SNAPCAP_MODEL\?"):
        read(SNAPCAP_MODLE="demo")
    with pytest.raises(SettingsError, match=r"SNAPCAP_XYZZY$"):
        read(SNAPCAP_XYZZY="1")
    read(OTHER="1")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SNAPCAP_PORT", "tcp://10.0.0.7:8000"),
        ("SNAPCAP_SERVICE_HOST", "10.0.0.7"),
        ("SNAPCAP_SERVICE_PORT", "8000"),
        ("SNAPCAP_SERVICE_PORT_HTTP", "8000"),
        ("SNAPCAP_PORT_8000_TCP", "tcp://10.0.0.7:8000"),
        ("SNAPCAP_PORT_8000_TCP_PROTO", "tcp"),
        ("SNAPCAP_PORT_8000_TCP_PORT", "8000"),
        ("SNAPCAP_PORT_8000_TCP_ADDR", "10.0.0.7"),
        ("SNAPCAP_CANARY_SERVICE_HOST", "10.0.0.7"),
        ("SNAPCAP_CANARY_PORT", "tcp://10.0.0.7:8000"),
    ],
)
def test_kubernetes_service_links_are_explained(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match="enableServiceLinks: false"):
        read(**{variable: value})


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--sign-key", "~nobody-has-this-name/k", "must be a path, and after ~ the name of a user"),
        ("--store", "~nobody-has-this-name/store", "must be a path, and after ~ the name of a user"),
        ("--cache-dir", "~nobody-has-this-name", "must be a path, and after ~ the name of a user"),
        ("--trusted-key", "~nobody-has-this-name/k", "must be a path, and after ~ the name of a user"),
        ("--build-timeout", "1e10", "must be at most 1000000000 seconds"),
    ],
)
def test_what_the_system_would_refuse_later_is_refused_now(flag: str, value: str, said: str) -> None:
    with pytest.raises(SettingsError, match=f"^{flag} {said}"):
        read(flag, value)
