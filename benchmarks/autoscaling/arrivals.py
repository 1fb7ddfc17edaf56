"""Draws the moments at which requests arrive: steadily, in bursts, rarely, and over a day with spikes."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Rate = Callable[[float], float]  # seconds since the beginning -> requests a second


@dataclass(frozen=True)
class Load:
    """A Poisson process whose rate changes with time.

    peak: the highest rate, in requests a second, which ``rate`` must not exceed. seconds: how long it lasts.
    replicas: that run at least, whatever the load.
    """

    title: str
    rate: Rate
    peak: float
    seconds: float
    replicas: int = 0

    def moments(self, seed: int) -> Iterator[float]:
        """Ascending, in seconds: by thinning (Lewis and Shedler, 1979)."""
        chooser, moment = random.Random(seed), 0.0
        while (moment := moment + chooser.expovariate(self.peak)) < self.seconds:
            if chooser.random() * self.peak < self.rate(moment):
                yield moment


def steady(per_second: float) -> Rate:
    return lambda _moment: per_second


def on_off(per_second: float, on: float, off: float) -> Rate:
    """``on`` seconds of load, ``off`` seconds of none, and again."""
    return lambda moment: per_second if moment % (on + off) < on else 0.0


def day(low: float, high: float, length: float, spike: float, every: float, lasting: float) -> Rate:
    """A day of ``length`` seconds as a sine from ``low`` to ``high``, and each ``every`` seconds a spike of
    ``spike`` times that for ``lasting`` seconds."""

    def rate(moment: float) -> float:
        base = low + (high - low) * (1 - math.cos(2 * math.pi * moment / length)) / 2
        return base * (spike if moment % every > every - lasting else 1.0)

    return rate


# A pod of two CPUs makes about 200 captions a second (`replicas.py`). The hour of a day is five minutes here.
LOADS = (
    Load("rare: one request in five minutes", steady(1 / 300), 1 / 300, 24 * 3600.0),
    Load("bursts: 100/s for 20 s, nothing for 10 min", on_off(100.0, 20.0, 600.0), 100.0, 2 * 3600.0),
    Load("a day: 1 to 40/s, spikes of five times that", day(1, 40, 7200.0, 5.0, 900.0, 30.0), 200.0, 7200.0, 1),
    Load("steady: 30/s, two replicas always", steady(30.0), 30.0, 3600.0, 2),
)
