"""What is quoted of repeated measurements."""

import pytest

from snapcap.benchmarks.harness.measurements import Samples, interleave, percentile, percentiles_ms


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


def test_cases_take_turns() -> None:
    order: list[str] = []

    def measure(name: str) -> dict[str, float]:
        order.append(name)
        return {"turn": float(len(order))}

    results = interleave(2, {"a": lambda: measure("a"), "b": lambda: measure("b")})
    assert order == ["a", "b", "a", "b"]
    assert results["b"].values == {"turn": [2.0, 4.0]}


def test_an_interrupted_measurement_keeps_what_it_has() -> None:
    def interrupted() -> dict[str, float]:
        raise KeyboardInterrupt

    results = interleave(2, {"a": lambda: {"turn": 1.0}, "b": interrupted})
    assert {name: samples.values for name, samples in results.items()} == {"a": {"turn": [1.0]}}
