"""Short real runs of `snapcap bench` on the demo model: what they print and write."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.servers.server_process import clean_environment, snapcap


@pytest.fixture(scope="module")
def startup(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Standard output and the JSON of one `bench startup`."""
    folder = tmp_path_factory.mktemp("startup")
    done = snapcap(
        "bench",
        "startup",
        "--cases=floor,eager",
        "--runs=1",
        "--serve=--buckets=1",
        f"--json={folder / 'start.json'}",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "start.json").read_text())


def test_the_moments_of_a_start_follow_each_other(startup: tuple[str, dict[str, Any]]) -> None:
    figures = startup[1]["figures"]
    assert 0 < figures["eager.live"] < figures["eager.ready"] < figures["eager.total"]
    assert figures["floor.total"] > 0


def test_a_warm_start_compiles_nothing(startup: tuple[str, dict[str, Any]]) -> None:
    assert startup[1]["figures"]["eager.compiles_serving"] == 0


def test_the_report_says_where_and_how_it_was_measured(startup: tuple[str, dict[str, Any]]) -> None:
    output, written = startup
    assert written["command"].startswith("snapcap bench startup --cases=floor,eager")
    assert "torch" in written["versions"]
    assert written["figures"]["eager.peak_host_mib"] > 50
    assert output.rstrip().splitlines()[-1].startswith("$ snapcap bench startup")


def test_peers_of_the_demo_model(tmp_path: Path) -> None:
    cases = "--cases=eager,transformers-batched"
    options = (cases, "--clients=2", "--seconds=0.5", "--rounds=1", "--serve=--buckets=1,2")
    done = snapcap("bench", "peers", *options, f"--json={tmp_path / 'p.json'}", timeout=300)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "p.json").read_text())
    assert set(written["samples"]) == {"eager", "transformers-batched"}
    for name in written["samples"]:
        figures = {each.removeprefix(f"{name}."): value for each, value in written["figures"].items()}
        assert 0 < figures["ready"] < figures["first_caption"]
        assert figures["captions_per_s"] > 0
        assert figures["errors"] == 0
    assert written["figures"]["eager.compiles_serving"] == 0


def test_latency_in_the_engine_and_over_http(tmp_path: Path) -> None:
    options = ("--cases=eager", "--concurrency=1,2", "--seconds=0.4", "--serve=--buckets=1,2")
    done = snapcap("bench", "latency", *options, f"--json={tmp_path / 'l.json'}")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "l.json").read_text())["figures"]
    for load in ("1", "2", "open"):
        p50, p90, p99 = (figures[f"http.eager.load.{load}.{name}_ms"] for name in ("p50", "p90", "p99"))
        assert 0 < p50 <= p90 <= p99
        assert figures[f"http.eager.load.{load}.errors"] == 0
    assert figures["engine.eager.concurrency.2.n"] > 1
    assert figures["engine.eager.steps.2.move_ms"] > 0


def test_a_terminated_run_shows_what_it_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "snapcap", "bench", "startup", "--cases=floor", "--runs=1000"]
    with subprocess.Popen(
        [*command, f"--json={tmp_path / 's.json'}"],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        counted = 0  # the first start does not count
        while counted < 2:
            line = process.stderr.readline()
            assert line, "it ended by itself"
            counted += line.startswith("floor: ")
        process.terminate()
        output = process.communicate()[0]
    assert process.returncode == 0
    assert "Cold start" in output
    assert len(json.loads((tmp_path / "s.json").read_text())["samples"]["floor"]["total"]) >= 1
