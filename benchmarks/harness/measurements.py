"""Repeats measurements of cases in turn, and computes medians and percentiles."""

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console


@dataclass
class Samples:
    """The values of a case, by the name of the measurement."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, measured: Mapping[str, float]) -> None:
        for name, value in measured.items():
            self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        values = self.values.get(name)
        return statistics.median(values) if values else None

    def need(self, name: str) -> float:
        """Returns the median of a measurement that must exist."""
        return statistics.median(self.values[name])


def interleave(runs: int, cases: Mapping[str, Callable[[], Mapping[str, float]]]) -> dict[str, Samples]:
    """Measures every case once, and then all again, so that disturbances of the machine affect all cases alike.

    If it is interrupted, returns the cases that have values already.
    """
    results = {name: Samples() for name in cases}
    with Console(stderr=True).status("") as status, contextlib.suppress(KeyboardInterrupt):
        for run in range(runs):
            for name, measure in cases.items():
                status.update(f"run {run + 1} of {runs}: {name}")
                results[name].add(measure())
    return {name: samples for name, samples in results.items() if samples.values}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the nearest-rank percentile of values in ascending order. ``share`` is from 0 to 1.

    Raises:
        ValueError: there are no values.
    """
    if not ordered:
        raise ValueError("a percentile of no values")
    rank = math.ceil(round(share * len(ordered), 9))  # without rounding, 0.07 * 100 is 7.000000000000001
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Returns p50, p90 and p99 of latencies, in milliseconds."""
    ordered = sorted(seconds)
    return {f"p{round(share * 100)}_ms": percentile(ordered, share) * 1000 for share in (0.50, 0.90, 0.99)}
