"""The command line of `snapcap bench`: what is refused, and how it says so."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from snapcap.benchmarks.command import make_parser
from snapcap.benchmarks.contenders import PEERS, Contenders
from snapcap.benchmarks.harness import arguments
from snapcap.benchmarks.harness.arguments import PageCacheError, some_of
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.startup import TITLES, Bench
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
        (["bench", "peers", "--cases", "floor"], "must be all, or some of aot"),
        (["bench", "peers", "--seconds", "-1"], "--seconds"),
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


def test_a_cold_disk_is_asked_for_of_starts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser()
    assert parser.parse_args(["startup", "--cold-disk"]).cold_disk
    assert not parser.parse_args(["startup"]).cold_disk
    assert main(["bench", "latency", "--cold-disk"]) == 2
    assert "--cold-disk" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["missing", "read-only", "of another user"])
def test_a_page_cache_that_cannot_be_dropped_is_refused_before_anything_is_measured(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "drop_caches"
    if kind != "missing":
        file.touch()
    monkeypatch.setattr(arguments, "DROP_CACHES", file)
    monkeypatch.setattr("os.geteuid", lambda: 1000 if kind == "of another user" else 0)
    monkeypatch.setattr("os.access", lambda path, _mode: path == file and kind == "of another user")
    assert main(["bench", "startup", "--cold-disk"]) == 2
    error = capsys.readouterr().err
    assert "takes root and a writable" in error
    assert error.count("\n") == 1


def test_a_page_cache_is_dropped_as_the_kernel_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "drop_caches"
    file.touch()
    monkeypatch.setattr(arguments, "DROP_CACHES", file)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.sync", lambda: None)
    arguments.require_drop()
    arguments.drop_page_cache()
    assert file.read_text() == "3"
    monkeypatch.setattr(arguments, "DROP_CACHES", tmp_path)  # a kernel that refuses
    with pytest.raises(PageCacheError):
        arguments.drop_page_cache()


@pytest.mark.parametrize("cold", [False, True])
def test_a_cold_start_drops_the_page_cache_first(
    cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr("snapcap.benchmarks.startup.drop_page_cache", lambda: events.append("drop"))
    monkeypatch.setattr("snapcap.benchmarks.startup.start_script", lambda *_: events.append("start"))
    workload = open_workload("demo", tmp_path)
    with ExitStack() as stack:
        contenders = Contenders(workload, "cpu", tmp_path, tmp_path, (), float("inf"))
        Bench(contenders, False, tmp_path, stack, cold).start("floor")
    assert events == ["drop"] * cold + ["start"]


def test_a_peer_that_is_not_installed_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PEERS["onnxruntime"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else object())
    assert peer.missing == ["onnxruntime"]
