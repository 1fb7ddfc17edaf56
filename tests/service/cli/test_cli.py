"""The command line up to where a command begins its work."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from snapcap.service.cli import build
from snapcap.service.cli import main as cli
from snapcap.service.cli.main import SERVE_SHOWN
from snapcap.service.config.settings import GROUPS, Settings
from snapcap.warmup.errors import StartError
from snapcap.warmup.option import options_of
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions

SERVE_SHOWN_IN_ORDER = [
    option.name for group in GROUPS.values() for option in options_of(group).values() if option.name in SERVE_SHOWN
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in GROUPS.values():
        for option in options_of(group).values():
            monkeypatch.delenv(option.variable, raising=False)


def output(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exited:
        cli.main(arguments)
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"snapcap {version('snapcap')}\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = output("--help", capsys=capsys)
    for command in ("serve", "caption", "import"):
        assert f"\n    {command} " in text
    assert "examples:" in text


def test_without_a_command_the_help_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: snapcap" in capsys.readouterr().err


def test_help_of_serve_has_every_option_with_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(output("serve", "--help-all", capsys=capsys).split())
    options = [option for group in GROUPS.values() for option in options_of(group).values()]
    for option in options:
        if option.name != "weights":  # of a build alone
            assert option.flag in text
            assert f"[default: {option.default_text}; {option.variable}]" in text
    assert "examples:" in text


def test_help_of_serve_shows_what_most_need_and_takes_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    text = output("serve", "--help", capsys=capsys)
    shown = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert shown == ["--help-all", *(f"--{name.replace('_', '-')}" for name in SERVE_SHOWN_IN_ORDER)]
    assert len(text.splitlines()) < 60
    assert "--help-all` lists all options" in text
    assert cli.main(["serve", "--queue-size", "0"]) == 2
    assert "--queue-size must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "unused", "used"),
    [
        ("serve", ("--weights",), ("--port",)),
        ("build", ("--strict", "--port", "--max-pixels"), ("--weights", "--max-image-tokens", "--max-new-tokens")),
        (
            "explain",
            ("--strict", "--weights", "--remote-cache"),
            ("--buckets", "--trusted-key", "--sign-key", "--max-image-tokens"),
        ),
        ("caption", ("--build-workers", "--decode-timeout", "--port"), ("--num-beams", "--store", "--max-pixels")),
        ("import", ("--store", "--port"), ("--s3-region",)),
    ],
)
def test_a_command_offers_what_it_uses(
    command: str, unused: tuple[str, ...], used: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--help-all" if command in ("serve", "caption") else "--help"
    flags = set(re.findall(r"--[a-z0-9-]+", output(command, asked, capsys=capsys)))
    assert not flags & set(unused)
    assert set(used) <= flags
    for flag in unused:
        assert cli.main([command, flag, "1", "x", "y"]) == 2
        assert f"unknown option {flag}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "caption", "import"])
def test_help_fits_a_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(command, "--help", capsys=capsys)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert text.startswith(f"usage: snapcap {command} [OPTION…]")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serv"], "unknown command 'serv'; did you mean serve?; see snapcap --help"),
        (["serve", "--prot", "1"], "unknown option --prot; did you mean --port?; see snapcap serve --help"),
        (
            ["caption", "--num_beams", "4", "a.png"],
            "unknown option --num_beams; did you mean --num-beams?; see snapcap caption --help",
        ),
        (["serve", "extra"], "unknown argument extra; see snapcap serve --help"),
        (["serve", "--port"], "argument --port: expected one argument; see snapcap serve --help"),
        (["serve", "--port", "x"], "--port must be a whole number from 0 to 65535, not 'x'"),
        (["caption"], "the following arguments are required: IMAGE; see snapcap caption --help"),
        (["caption", "--top-k", "x", "a.png"], "The option 'top_k' must be a whole number from 0 to 2147483647."),
        (["caption", "--num-beams", "9", "a.png"], "The option 'num_beams' must be a whole number from 1 to 8."),
        (["--prot"], "unknown option --prot; did you mean --port?; see snapcap --help"),
    ],
)
def test_a_bad_command_line_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"snapcap: {line}\n"


def test_a_bad_variable_stops_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SNAPCAP_PORT", "tcp://10.0.0.7:8000")
    for arguments in (["serve"], ["caption", "a.png"], ["import", "a", "b"]):
        assert cli.main(arguments) == 2
        assert "enableServiceLinks: false" in capsys.readouterr().err


def test_a_model_that_cannot_be_read_has_an_exit_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{")
    cache = ("--cache-dir", str(tmp_path / "cache"))
    assert cli.main(["import", str(model), str(tmp_path / "new")]) == 3
    assert cli.main(["explain", "--model", str(model), *cache]) == 3
    assert build.build(Settings(model=ModelOptions(source=str(model), cache_dir=tmp_path / "cache"))) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all("config.json cannot be read" in line for line in lines)


HEAVY = ("torch", "numpy", "PIL", "transformers", "tokenizers", "boto3", "huggingface_hub")
WEB = ("fastapi", "pydantic", "starlette", "uvicorn")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            "snapcap.service.api.app, snapcap.service.server.http_process, snapcap.service.server.serve",
            HEAVY,
        ),
        (
            "snapcap.service.cli.entry, snapcap.service.server.processes",
            (*HEAVY, *WEB, "argparse", "asyncio", "logging", "pickle", "snapcap.service.config"),
        ),
        ("snapcap.service.cli.main, snapcap.service.server.serve", (*HEAVY, *WEB, "asyncio", "prometheus_client")),
        (
            "snapcap.service.captioning.captioner, snapcap.service.telemetry.metrics, "
            "snapcap.service.telemetry.start_metrics, snapcap.service.errors",
            (*HEAVY, *WEB),
        ),
    ],
)
def test_what_answers_first_imports_nothing_heavy(modules: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print(*(name for name in {unwanted!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_jit_build_is_strict_whatever_servers_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One environment is for servers and builds; a part of the buckets would be published as the whole."""
    told: list[StartOptions] = []

    def stop(options: StartOptions, *_: object) -> None:
        told.append(options)
        raise StartError("stopped here")

    monkeypatch.setattr(build, "load", stop)
    compute = ComputeOptions(backend="jit", device="cpu", buckets=(1, 2))
    model = ModelOptions(cache_dir=tmp_path, prepared_weights=False)
    assert build.build(Settings(model=model, compute=compute)) == 1
    assert "stopped here" in capsys.readouterr().err
    assert [each.compute.strict for each in told] == [True]
