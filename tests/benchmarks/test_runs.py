"""Short real runs of `snapcap bench` on the demo model: what they print, write and draw."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.servers.server_process import clean_environment, snapcap

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def startup(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """Standard output, the JSON, and the folder of one `bench startup`."""
    folder = tmp_path_factory.mktemp("startup")
    done = snapcap(
        "bench",
        "startup",
        "--cases=floor,eager",
        "--runs=1",
        "--serve=--buckets=1",
        f"--json={folder / 'start.json'}",
        f"--png={folder / 'start.png'}",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "start.json").read_text()), folder


def test_the_phases_of_a_start_sum_to_its_total(startup: tuple[str, dict[str, Any], Path]) -> None:
    for name in ("floor", "eager"):
        (start,) = startup[1]["cases"][name]["starts"]
        segments = start["segments"]
        assert segments[0]["start"] == 0.0
        assert sum(s["end"] - s["start"] for s in segments) == pytest.approx(start["total"], abs=1e-6)
    names = {segment["name"] for segment in segments}
    assert {"interpreter", "import_torch", "warm_encoder", "first_caption"} <= names


def test_a_warm_start_compiles_and_starts_nothing(startup: tuple[str, dict[str, Any], Path]) -> None:
    case = startup[1]["cases"]["eager"]
    (start,) = case["starts"]
    assert start["values"]["compiles_serving"] == 0
    assert start["facts"]["compilers"] == case["watched"]["compilers"] == []
    assert case["watched"]["programs"] == []
    assert start["facts"]["children"]["ended"] in (False, None)  # None: a kernel that does not count


def test_the_report_says_where_and_how_it_was_measured(startup: tuple[str, dict[str, Any], Path]) -> None:
    output, written, folder = startup
    assert written["command"].startswith("snapcap bench startup --cases=floor,eager")
    assert "torch" in written["versions"]
    assert written["cases"]["eager"]["medians"]["peak_host_mib"] > 50
    assert output.rstrip().splitlines()[-1].startswith("$ snapcap bench startup")
    assert (folder / "start.png").read_bytes().startswith(PNG)


def test_throughput_of_the_demo_model(tmp_path: Path) -> None:
    options = ("--cases=eager", "--clients=2", "--seconds=1", "--rounds=1", "--serve=--buckets=1,2")
    done = snapcap("bench", "throughput", *options, f"--json={tmp_path / 't.json'}", f"--png={tmp_path / 't.png'}")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "t.json").read_text())
    samples = written["samples"]["eager"]
    assert samples["captions_per_s"][0] > 1
    assert samples["errors"] == samples["compiles_serving"] == [0.0]
    assert 0 <= samples["encoder_padding"][0] < 1
    engine = written["engine"]["eager"]
    assert engine["concurrency"]["2"]["n"] > 1
    assert set(engine["steps"]) == {"1", "2"}
    assert (tmp_path / "t.png").read_bytes().startswith(PNG)


def test_latency_over_http(tmp_path: Path) -> None:
    options = ("--cases=eager", "--concurrency=1,2", "--seconds=1", "--no-engine", "--serve=--buckets=1,2")
    done = snapcap("bench", "latency", *options, f"--json={tmp_path / 'l.json'}")
    assert done.returncode == 0, done.stderr
    case = json.loads((tmp_path / "l.json").read_text())["http"]["eager"]
    assert set(case["closed"]) == {"1", "2"}
    for measured in (*case["closed"].values(), case["at_70_percent"]):
        assert 0 < measured["p50_ms"] <= measured["p90_ms"] <= measured["p99_ms"]
        assert measured["errors"] == 0


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
        while "not counted" in (line := process.stderr.readline()) or not line.startswith("floor: "):
            assert line, "it ended by itself"
        process.terminate()
        output = process.communicate()[0]
    assert process.returncode == 0
    assert "Cold start" in output
    assert len(json.loads((tmp_path / "s.json").read_text())["cases"]["floor"]["starts"]) >= 1
