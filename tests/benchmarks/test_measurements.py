"""What is quoted of repeated measurements."""

import pytest

from snapcap.benchmarks.harness.report import Samples, figures_of, percentile, percentiles_ms


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 50.0), (0.9, 90.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0)]
)
def test_a_percentile_is_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile([float(value) for value in range(1, 101)], share) == expected


def test_the_percentiles_of_one_value_are_that_value() -> None:
    assert percentiles_ms([0.25]) == {"p50_ms": 250.0, "p90_ms": 250.0, "p99_ms": 250.0}


def test_percentiles_do_not_ask_for_an_order() -> None:
    assert percentiles_ms([0.003, 0.001, 0.002])["p50_ms"] == pytest.approx(2.0)


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_samples_keep_every_value_and_give_the_median() -> None:
    samples = Samples()
    for value in (3.0, 1.0, 2.0):
        samples.add({"ready": value})
    assert (samples.need("ready"), samples.median("live")) == (2.0, None)
    assert samples.values["ready"] == [3.0, 1.0, 2.0]


def test_figures_are_the_medians_of_each_case() -> None:
    samples = Samples({"ready": [3.0, 1.0, 2.0]})
    assert figures_of({"aot": samples, "eager": Samples({"ready": [4.0]})}) == {
        "aot.ready": 2.0,
        "eager.ready": 4.0,
    }
