"""The gaps between decode steps, with moments of the host in place of a device's events."""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from snapcap.benchmarks.device.step_gaps import Gaps, Steps, measure, report
from snapcap.benchmarks.harness.common import ROOT, environment
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.load.engine import Opened, captioned_right, open_engine


class Moment:
    """As an event, but of this thread: the CPU has done what it was given when it returns."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Moment") -> float:
        return (end.at - self.at) * 1000


def moment(milliseconds: float) -> Moment:
    made = Moment()
    made.at = milliseconds / 1000
    return made


def test_gaps_are_between_steps_with_nothing_else_between_them() -> None:
    marks: list[Any] = [(0, 2), (3, 5), None, (20, 22), (22.5, 25), None]
    steps = Steps(Moment)
    steps.marks = [mark and (moment(mark[0]), moment(mark[1])) for mark in marks]
    found = steps.gaps()
    assert found.steps == pytest.approx([2, 2, 2, 2.5])
    assert found.gaps == pytest.approx([1, 0.5])
    assert found.periods == pytest.approx([3, 3])
    assert found.idle == pytest.approx(0.25)


def test_the_table_has_microseconds_of_gaps_and_the_share() -> None:
    gaps = Gaps([2.0] * 3, [0.5, 0.25, 0.25], [2.5, 2.25, 2.25], alone=1.9)
    (table,) = report({(4, "read behind"): gaps}).tables
    numbers = ["2.000", "250.0", "500.0", "500.0", "14.3", "2.250", "1.900", "3"]
    assert table["rows"] == [["4 rows, read behind", *numbers]]


@pytest.fixture
def opened(tmp_path: Path, demo_folder: Path) -> Iterator[Opened]:
    options = {"model": demo_folder, "cache": tmp_path, "device": "cpu", "backend": "eager"}
    opened = open_engine(argparse.Namespace(**options, buckets="1,4", threads=1))
    yield opened
    opened.close()


def test_the_engines_steps_are_watched_and_only_while_they_are_measured(opened: Opened, tmp_path: Path) -> None:
    runner = opened.loaded.runner
    before = runner.encode, runner.decode_step
    images = captioned_right(opened, list(open_workload("demo", tmp_path).images.values()))[:1]
    found = measure(opened, images, rows=4, rounds=2, event=Moment)
    assert len(found.steps) == len(found.gaps) + 2, "each round begins with an encode"
    assert len(found.gaps) > 4
    assert min(found.gaps) > 0
    assert 0 < found.idle < 1
    assert (runner.encode, runner.decode_step) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="A CUDA DEVICE IS HERE: NO REFUSAL IS TESTED")
@pytest.mark.parametrize("command", ["step_gaps", "weights"])
def test_without_a_cuda_device_the_command_says_so(command: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", f"snapcap.benchmarks.device.{command}"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith(f"snapcap.benchmarks.device.{command} needs a CUDA device: ")
    assert "Traceback" not in run.stderr
