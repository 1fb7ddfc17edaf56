"""Servers take turns in a comparison, and those that were not measured are named with the reason."""

import argparse
import json
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapcap.benchmarks import contenders, startup
from snapcap.benchmarks.contenders import PEERS, Contenders, Start
from snapcap.benchmarks.harness.server import Endpoint
from snapcap.benchmarks.harness.workload import Workload, open_workload
from snapcap.benchmarks.startup import Bench


class Rounds:
    """Measures nothing. ``order`` has the turns; a server in ``broken`` fails, and each takes ``seconds``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problems: dict[str, str]) -> None:
        self.order: list[str] = []
        self.broken: dict[str, BaseException] = {}
        self.clock = 0.0
        self._file = tmp_path / "peers.json"
        workload = cast(Workload, SimpleNamespace(images=tmp_path))
        found = Contenders(workload, "cpu", *[tmp_path] * 2, (), end=100.0, problems=problems)
        monkeypatch.setattr(contenders, "open_contenders", lambda *_: nullcontext(found))
        monkeypatch.setattr(contenders, "measure", lambda _, name, __: self._measure(name))
        monkeypatch.setattr("time.monotonic", lambda: self.clock)

    def _measure(self, name: str) -> dict[str, float]:
        self.order.append(name)
        self.clock += 30.0
        if name in self.broken:
            raise self.broken[name]
        names = ("ready", "first_caption", "lone_ms", "captions_per_s", "p50_ms", "p99_ms", "memory_mib", "errors")
        return dict.fromkeys((*names, "cpu_ms_per_caption"), float(len(self.order)))

    def run(self, *cases: str, rounds: int) -> tuple[int, dict[str, Any]]:
        given = {"cases": list(cases), "rounds": rounds, "clients": 4, "seconds": 1.0}
        options = argparse.Namespace(**given, measure="peers", model="demo", json=self._file, time_limit=100.0)
        return contenders.run(options, "cpu"), json.loads(self._file.read_text())


def test_servers_take_turns_and_figures_are_medians(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rounds = Rounds(monkeypatch, tmp_path, {"litserve": "not installed: litserve"})
    status, written = rounds.run("aot", "litserve", "eager", rounds=1)
    assert (status, rounds.order) == (0, ["aot", "eager"])
    assert written["figures"]["eager.ready"] == 2.0
    assert written["samples"]["aot"]["ready"] == [1.0]
    assert written["problems"] == {"litserve": "not installed: litserve"}


def test_no_round_begins_that_would_end_after_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rounds = Rounds(monkeypatch, tmp_path, {})
    status, written = rounds.run("aot", "eager", rounds=5)
    assert (status, rounds.order) == (0, ["aot", "eager", "aot"])
    assert written["samples"]["aot"]["ready"] == [1.0, 3.0]
    assert (written["figures"]["aot.ready"], written["figures"]["eager.ready"]) == (2.0, 2.0)
    assert written["problems"] == {}


def test_a_server_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rounds = Rounds(monkeypatch, tmp_path, {})
    rounds.broken["onnxruntime"] = RuntimeError("first line\nanother")
    status, written = rounds.run("onnxruntime", "aot", rounds=1)
    assert (status, list(written["samples"])) == (1, ["aot"])
    assert written["problems"] == {"onnxruntime": "failed: first line"}


def test_an_interrupted_run_shows_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rounds = Rounds(monkeypatch, tmp_path, {})
    rounds.broken["eager"] = KeyboardInterrupt()
    _, written = rounds.run("aot", "eager", "litserve", rounds=1)
    assert list(written["samples"]) == ["aot"]
    assert set(written["problems"]) == {"eager", "litserve"}


def test_an_interruption_between_two_measurements_shows_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.setattr(contenders.Console, "print", lambda *_, **__: None)
        raise KeyboardInterrupt

    rounds = Rounds(monkeypatch, tmp_path, {})
    monkeypatch.setattr(contenders.Console, "print", interrupted)
    _, written = rounds.run("aot", "eager", rounds=2)
    assert (rounds.order, list(written["samples"])) == (["aot"], ["aot"])
    assert set(written["problems"]) == {"aot", "eager"}


def test_a_server_that_cannot_be_measured_here_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = replace(open_workload("demo", tmp_path), folder=tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["BlipForConditionalGeneration"]}')
    options = argparse.Namespace(
        cases=["onnxruntime", "eager"], model="demo", cache=None, serve="", time_limit=60.0
    )
    monkeypatch.setattr(contenders, "open_workload", lambda *_: workload)
    with contenders.open_contenders(options, "cpu") as found:
        assert found.rounds(options.cases, 2, lambda name: name) == {"eager": ["eager", "eager"]}
    assert "gpt2" in found.problems["onnxruntime"]
    assert not found.problems["onnxruntime"].startswith("failed")


def test_a_start_that_compiles_after_ready_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(compiles=lambda: {"compiles_serving": 2.0}, close=lambda: None)
    monkeypatch.setattr(startup, "Server", lambda *_: server)
    found = Contenders(
        cast(Workload, SimpleNamespace(folder=Path("x"))), "cpu", *[Path()] * 2, (), end=float("inf")
    )
    monkeypatch.setattr(found, "first_captions", lambda _: Start({"ready": 1.0}))
    found.rounds(["aot"], 1, Bench(found, ExitStack()).start)
    assert found.problems == {"aot": "failed: it compiled 2 graphs after READY"}


def test_an_image_comes_as_the_server_takes_it() -> None:
    assert Endpoint("/caption", None).body(b"image") == (b"image", "application/octet-stream")
    body, kind = PEERS["litserve"].api.body(b"image")
    assert (json.loads(body), kind) == ({"image": "aW1hZ2U="}, "application/json")
