"""The jit backend on two small regions, in a process of its own: graphs, modes, and what happens when none fits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.servers.server_process import clean_environment

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `support.checkpoints.jit_regions` prints: encoder at 2 and 3 rows and decoder at 2, two layers each."""
    run = subprocess.run(
        [sys.executable, "-m", "support.checkpoints.jit_regions", str(tmp_path_factory.mktemp("jit"))],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_layers_share_a_graph_and_buckets_have_one_each_below_the_recompile_limit(report: dict[str, Any]) -> None:
    assert report["graphs"] == 3
    assert report["counts"] == {"hits": 0, "misses": 6, "bypasses": 0}  # in two caches


def test_the_mode_of_each_component_reaches_inductor(report: dict[str, Any]) -> None:
    assert report["autotuned"] == [False, False, True]


def test_after_the_warm_up_a_call_that_fits_no_graph_runs_eager_is_counted_and_logged_once(
    report: dict[str, Any],
) -> None:
    assert report["fallbacks"] == [["encoder_block", "2", 3]]
    assert report["messages"] == ["no compiled graph fits; the region runs eager"]
    assert report["graphs_after"] == report["graphs"]


def test_with_the_strict_stance_it_fails_and_a_call_that_fits_does_not(report: dict[str, Any]) -> None:
    assert "Detected recompile" in report["failed"]
    assert "encoder_block_b2" in report["failed"]
