"""The comparison of two running servers: the interval of its ratio, and what it says of one that is wrong."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapcap.benchmarks.harness.workload import open_workload, read_images
from snapcap.benchmarks.load.compare import __name__ as COMPARE
from snapcap.benchmarks.load.compare import load, median_interval
from tests.benchmarks.test_load import ROOT, answering


def test_the_interval_of_a_median_is_the_binomials_order_statistics() -> None:
    # Tables of the sign test: of 20 values the 6th and the 15th, of 40 the 14th and the 27th.
    assert median_interval([*range(1, 21)]) == (6, 15)
    assert median_interval([*reversed(range(1, 41))]) == (14, 27)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_values_say_no_more_than_what_was_seen(count: int) -> None:
    values = [1.0 * each for each in range(count)]
    assert median_interval(values) == (values[0], values[-1])
    assert values[0] <= statistics.median(values) <= values[-1]


def test_the_slower_of_two_servers_is_found(tmp_path: Path) -> None:
    images = open_workload("demo", tmp_path).write_images(tmp_path / "images")
    captions = dict(read_images(images))

    def right(body: bytes) -> tuple[int, bytes]:
        time.sleep(0.01)
        return 200, json.dumps({"caption": captions[body]}, separators=(",", ":")).encode()

    def late(body: bytes) -> tuple[int, bytes]:
        time.sleep(0.05)
        return right(body)

    with answering(right) as first, answering(late) as second:
        command = [sys.executable, "-m", COMPARE, str(first), str(second), "--clients", "2"]
        command += ["--rounds", "2", "--seconds", "0.3", "--json", str(tmp_path / "compare.json")]
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    (table,) = json.loads((tmp_path / "compare.json").read_text())["tables"]
    note = table["note"].split()
    assert note[:4] == ["captions/s,", str(second), "÷", f"{first}:"]
    assert 0.02 < float(note[4].rstrip(",")) < 0.7


def test_a_server_that_is_wrong_is_no_result(tmp_path: Path) -> None:
    images = open_workload("demo", tmp_path).write_images(tmp_path / "images")
    with (
        answering(lambda body: (200, b'{"caption":"something else"}')) as port,
        pytest.raises(RuntimeError) as error,
    ):
        load(port, images, 2, 0.2)
    assert str(port) in str(error.value)
    assert "wrong" in str(error.value)
