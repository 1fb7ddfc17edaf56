"""What is quoted of repeated measurements."""

import io
import math

import pytest
from rich.console import Console

from snapcap.benchmarks.harness.report import Column, Report, Samples, percentiles_ms, ratio


def test_a_percentile_is_the_nearest_rank() -> None:
    milliseconds = [float(value) for value in range(1, 102)]
    found = percentiles_ms([value / 1000 for value in milliseconds])
    assert found == pytest.approx({"p50_ms": 51.0, "p90_ms": 91.0, "p99_ms": 100.0})


def test_the_percentiles_of_one_value_are_that_value() -> None:
    assert percentiles_ms([0.25]) == {"p50_ms": 250.0, "p90_ms": 250.0, "p99_ms": 250.0}


def test_percentiles_do_not_ask_for_an_order() -> None:
    assert percentiles_ms([0.003, 0.001, 0.002])["p50_ms"] == pytest.approx(2.0)


def test_samples_keep_every_value_and_give_the_median() -> None:
    samples = Samples.of({"ready": value} for value in (3.0, 1.0, 2.0))
    assert samples.median("ready") == 2.0
    assert math.isnan(samples.median("live"))
    assert samples.values["ready"] == [3.0, 1.0, 2.0]


def test_a_case_without_a_measurement_has_an_empty_cell() -> None:
    report, output = Report(), io.StringIO()
    cases = {"one": Samples({"ready": [1.0, 2.0]}), "two": Samples({"total": [3.0]})}
    columns: dict[str, Column] = {"READY": "ready .2f", "÷": lambda case: ratio(case.median("total"), 2.0)}
    report.add_cases("Starts", cases, columns, "a note")
    report.add_cases("Empty", {}, columns)
    Console(file=output, width=150).print(*report.tables)
    rows = [line.split() for line in output.getvalue().splitlines()]
    assert ["one", "1.50"] in rows
    assert ["two", "1.50", "×"] in rows
    assert ["a", "note"] in rows
    assert len(report.tables) == 1
