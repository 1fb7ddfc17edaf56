"""The table of compile modes: eager for real, and what the table makes of numbers."""

from pathlib import Path

import pytest

from benchmarks.common import DEMO, SAMPLES
from benchmarks.compile_modes import CASES, Setup, measure, report
from benchmarks.measurements import Samples

SETUP = Setup(str(DEMO), SAMPLES / "pair-1.png", "cpu", "auto", 1, (1, 2))


def samples(**values: float) -> Samples:
    found = Samples()
    found.add(values)
    return found


def test_the_eager_case_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = measure("eager", SETUP, tmp_path)
    assert len(found["tokens"]) == 12
    assert 0 < found["until_interpreter"] < found["until_import_torch"] < found["until_first_step"]
    assert found["until_first_step"] <= found["until_all_buckets"] < found["until_done"]
    steady = [found[f"{component}_{size}"] for component in ("encoder", "decoder") for size in SETUP.buckets]
    assert all(value > 0 for value in steady)
    assert found["initial_encoder"] > 0
    assert found["peak_host_mib"] > 100
    assert "graphs" not in found  # no compiler was imported


def test_a_case_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-image"):
        measure("eager", Setup(str(DEMO), Path("no-such-image"), "cpu", "auto", 1, (1,)), tmp_path)


def test_ratios_are_to_eager_and_failures_are_named() -> None:
    eager = samples(
        until_first_step=2, until_all_buckets=2, initial_encoder=0.1, initial_decoder=0.1, peak_host_mib=200
    )
    eager.add({"encoder_1": 10, "encoder_2": 20, "decoder_1": 4, "decoder_2": 6})
    full = samples(
        until_first_step=30, until_all_buckets=50, initial_encoder=20.012, initial_decoder=9.005, peak_host_mib=300
    )
    full.add({"encoder_1": 4, "encoder_2": 8, "decoder_1": 2, "decoder_2": 3, "hits": 0, "misses": 8})
    tokens = {"eager": {"tokens": [1, 2]}, "full": {"tokens": [1, 3]}, "regional": {"failed": "no compiler"}}
    results = {"eager": eager, "full": full, "regional": Samples()}
    first, later, failed = report(results, tokens, SETUP, 1).tables
    row = first["rows"][1]
    assert row[:5] == [CASES["full"].title, "30.0", "15.00 ×", "50.0", "25.00 ×"]
    assert row[5:] == ["20.0", "9.0", "0/8", "300", "1.50 ×", "no"]
    assert later["rows"][1] == [
        CASES["full"].title, "4.000", "2.50 ×", "8.000", "2.50 ×", "2.000", "2.00 ×", "3.000", "2.00 ×"
    ]  # fmt: skip
    assert failed["rows"] == [[CASES["regional"].title, "no compiler"]]


def test_what_is_restored_is_measured_before() -> None:
    order = list(CASES)
    for name, case in CASES.items():
        assert not case.restores or order.index(case.restores) < order.index(name)
