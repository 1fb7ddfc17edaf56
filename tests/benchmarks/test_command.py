"""The command line of `snapcap bench`: what is refused, and how it says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from snapcap.benchmarks.command import make_parser
from snapcap.benchmarks.contenders import PEERS
from snapcap.benchmarks.harness.arguments import some_of
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.startup import TITLES
from snapcap.service.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["bench"], "WHAT"),
        (["bench", "speed"], "invalid choice: 'speed'"),
        (["bench", "startup", "--cases", "aot,warp"], "must be all, or some of floor"),
        (["bench", "startup", "--model", "bert"], "invalid choice: 'bert'"),
        (["bench", "startup", "--runs", "many"], "--runs"),
        (["bench", "startup", "--runs", "0"], "--runs"),
        (["bench", "latency", "--concurrency", "1,0"], "must be a whole number of at least 1"),
        (["bench", "peers", "--cases", "floor"], "must be all, or some of aot"),
        (["bench", "peers", "--seconds", "-1"], "--seconds"),
        (["bench", "modes", "--cases", "aot"], "must be all, or some of eager"),
        (["bench", "modes", "--buckets", "0"], "must be a whole number of at least 1"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
    assert error.startswith("snapcap: ")


def test_cases_come_in_the_order_of_the_table_and_each_once() -> None:
    read = some_of(TITLES)
    assert read("eager, floor,eager") == ["floor", "eager"]
    assert read("all") == list(TITLES)


@pytest.mark.parametrize("measure", ["peers", "startup", "latency", "modes"])
def test_every_measurement_has_help(measure: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([measure, "--help"])
    assert ended.value.code == 0
    assert "--cases" in capsys.readouterr().out


def test_the_help_of_snapcap_lists_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "bench" in capsys.readouterr().out


def test_the_help_says_what_a_report_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["report", "--help"])
    assert ended.value.code == 0
    assert "benchmarks/results" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "device", "part"), [("demo", "cuda", "CPU alone"), ("blip", "cpu", "gpt2")])
def test_what_is_not_exported_is_named(model: str, device: str, part: str, tmp_path: Path) -> None:
    workload = open_workload("demo", tmp_path)
    if model == "blip":
        (tmp_path / "config.json").write_text('{"architectures": ["BlipForConditionalGeneration"]}')
        workload = replace(workload, folder=tmp_path)
    assert part in PEERS["onnxruntime"].unavailable(workload, device)


def test_a_peer_that_is_not_installed_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PEERS["onnxruntime"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else object())
    assert peer.missing == ["onnxruntime"]
