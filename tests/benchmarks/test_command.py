"""The command line of `snapcap bench`: what is refused, and how it says so."""

import sys

import pytest

from snapcap.benchmarks.command import make_parser
from snapcap.benchmarks.harness.arguments import some_of
from snapcap.benchmarks.peers.commands import PEERS
from snapcap.benchmarks.startup.bench import TITLES
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
        (["bench", "latency", "--concurrency", "1,0"], "must be numbers above 0"),
        (["bench", "throughput", "--cases", "floor"], "must be all, or some of aot"),
        (["bench", "throughput", "--seconds", "-1"], "--seconds"),
        (["bench", "modes", "--cases", "aot"], "must be all, or some of eager"),
        (["bench", "modes", "--buckets", "0"], "must be numbers above 0"),
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


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "startup", "--png", "start.png"]) == 2
    assert "snapcap[bench]" in capsys.readouterr().err


def test_cases_come_in_the_order_of_the_table_and_each_once() -> None:
    read = some_of(TITLES)
    assert read("eager, floor,eager") == ["floor", "eager"]
    assert read("all") == list(TITLES)


@pytest.mark.parametrize("measure", ["startup", "latency", "throughput", "modes"])
def test_every_measurement_has_help(measure: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([measure, "--help"])
    assert ended.value.code == 0
    assert "--cases" in capsys.readouterr().out


def test_the_help_of_snapcap_lists_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "bench" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PEERS["litserve"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "litserve" else object())
    assert peer.missing == ["litserve"]
