"""Simulates the worth of a fast start: replicas follow their load, and differ in how fast they are ready.

    python -m snapcap.benchmarks.autoscaling [--servers FILE] [--pod 1] [--json FILE]

Every server gets the same arrivals. Requests wait in one queue until a replica has room, as in a balancer. The
servers' numbers are those of `snapcap bench peers`, except for the start of vLLM, which is a published number.
"""

import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.arguments import make_parser, seconds
from snapcap.benchmarks.harness.report import Report, percentile
from snapcap.benchmarks.harness.workload import ROOT

Rate = Callable[[float], float]  # Maps seconds since the beginning to requests a second.
LATE_S = 5.0
SERVERS = ROOT / "benchmarks" / "results" / "peers-cpu-demo.json"
FORMATS = ("{:.0f}", "{:.3f}", "{:.3f}", "{:.1%}", "{:.2f}", "{:.0f}")
CLIENTS = 16  # number of clients in the throughput measurements; each server reaches its best rate with it
# Published start of vLLM, 0.5 B parameters on a GPU, with a warm compile cache (vllm-project/vllm#40323).
VLLM_START_S = 39.5


@dataclass(frozen=True)
class Load:
    """A Poisson process whose ``rate`` changes with time, up to ``peak``. At least ``replicas`` replicas run."""

    title: str
    rate: Rate
    peak: float
    seconds: float
    replicas: int = 0

    def moments(self, seed: int) -> Iterator[float]:
        """Yields the moments of arrivals in seconds, ascending, by thinning (Lewis and Shedler, 1979)."""
        chooser, moment = random.Random(seed), 0.0
        while (moment := moment + chooser.expovariate(self.peak)) < self.seconds:
            if chooser.random() * self.peak < self.rate(moment):
                yield moment


def on_off(per_second: float, on: float = math.inf, off: float = 0.0) -> Rate:
    """Returns a rate of ``on`` seconds of load and ``off`` seconds of none, in turn, by default a steady load."""
    return lambda moment: per_second if moment % (on + off) < on else 0.0


def day(low: float, high: float, length: float, spike: float, every: float, lasting: float) -> Rate:
    """Returns a sine of ``length`` seconds. Every ``every`` seconds, ``spike`` multiplies it for ``lasting``."""

    def rate(moment: float) -> float:
        base = low + (high - low) * (1 - math.cos(2 * math.pi * moment / length)) / 2
        return base * (spike if moment % every > every - lasting else 1.0)

    return rate


# A pod of two CPUs makes about 200 captions a second. An hour of the day lasts five minutes here.
LOADS = (
    Load("rare: one request in five minutes", on_off(1 / 300), 1 / 300, 24 * 3600.0),
    Load("bursts: 100/s for 20 s, nothing for 10 min", on_off(100.0, 20.0, 600.0), 100.0, 2 * 3600.0),
    Load("a day: 1 to 40/s, spikes of five times that", day(1, 40, 7200.0, 5.0, 900.0, 30.0), 200.0, 7200.0, 1),
    Load("steady: 30/s, two replicas always", on_off(30.0), 30.0, 3600.0, 2),
)


@dataclass(frozen=True)
class Replica:
    """A server in the simulation.

    start: seconds from exec until READY.
    lone: seconds of a request that is alone.
    rate: greatest number of requests a second.
    places: number of requests at the same time with which the server reaches ``rate``.
    """

    title: str
    start: float
    lone: float
    rate: float
    places: int


def measured(run: Mapping[str, Any]) -> list[Replica]:
    """Returns the servers of the comparison, with the numbers of one run of `snapcap bench peers`."""
    figures = run["figures"]

    def replica(title: str, case: str) -> Replica:
        start, lone, rate = (figures[f"{case}.{name}"] for name in ("ready", "lone_ms", "captions_per_s"))
        return Replica(title, start, lone / 1000, rate, CLIENTS)

    snapcap = replica("snapcap", "aot")
    return [
        snapcap,
        replica("FastAPI + ONNX Runtime", "onnxruntime"),
        replica("FastAPI + transformers", "transformers-eager"),
        replace(snapcap, title="snapcap, if it started as vLLM (published)", start=VLLM_START_S),
    ]


@dataclass(frozen=True)
class Autoscaler:
    """The settings of `deploy/kubernetes`. ``pod`` is the seconds from the decision until a replica's process
    runs."""

    target: float = 6.0  # requests in flight for each replica
    every: float = 10.0
    doubles_in: float = 15.0
    stays: float = 300.0
    falls_in: float = 60.0
    most: int = 50
    pod: float = 1.0


@dataclass(eq=False)
class _Running:
    """A replica. A replica takes requests from the moment ``ready`` on, until it is ``leaving``."""

    began: float
    ready: float
    leaving: bool = False
    busy: int = 0


class Fleet:
    """The state of a simulation. At least ``least`` replicas run, from the beginning."""

    def __init__(self, kind: Replica, scaler: Autoscaler, least: int) -> None:
        self.latencies, self.replica_seconds, self.starts = list[float](), 0.0, 0
        self._kind, self._scaler, self._least = kind, scaler, least
        self._now, self._due, self._turn = 0.0, list[tuple[float, int, Callable[[], None]]](), count()
        self._waiting: deque[float] = deque()  # moments of arrival of the waiting requests
        self._replicas = [_Running(0.0, 0.0) for _ in range(least)]
        # Moment and number of needed replicas, for the last minutes.
        self._needed: deque[tuple[float, int]] = deque()
        self._doubled = self._lowered = -math.inf

    def run(self, moments: Iterable[float]) -> "Fleet":
        for moment in moments:
            self._at(moment, self._arrive)
        under_way = len(self._due)
        self._at(self._scaler.every, self._scale)
        while len(self.latencies) < under_way:
            self._now, _, action = heappop(self._due)
            action()
        self.replica_seconds += sum(self._now - each.began for each in self._replicas)
        return self

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.latencies)
        return {
            "requests": float(len(ordered)),
            "p50_s": percentile(ordered, 0.50),
            "p99_s": percentile(ordered, 0.99),
            "late": sum(latency > LATE_S for latency in ordered) / len(ordered),
            "replica_hours": self.replica_seconds / 3600,
            "starts": float(self.starts),
        }

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        heappush(self._due, (moment, next(self._turn), action))

    def _arrive(self) -> None:
        self._waiting.append(self._now)
        if not self._replicas:
            self._needed.append((self._now, 1))
            self._start()
        self._serve()

    def _serve(self) -> None:
        placed = []
        while self._waiting:
            taking = [each for each in self._replicas if each.ready <= self._now and not each.leaving]
            replica = min(taking, key=lambda each: each.busy, default=None)
            if replica is None or replica.busy >= self._kind.places:
                break
            replica.busy += 1
            placed.append((replica, self._waiting.popleft()))
        for replica, came in placed:
            takes = max(self._kind.lone, replica.busy / self._kind.rate)
            self._at(self._now + takes, partial(self._reply, replica, came))

    def _reply(self, replica: _Running, came: float) -> None:
        self.latencies.append(self._now - came)
        replica.busy -= 1
        self._end_if_idle(replica)
        self._serve()

    def _start(self) -> None:
        ready = self._now + self._scaler.pod + self._kind.start
        self._replicas.append(_Running(self._now, ready))
        self.starts += 1
        self._at(ready, self._serve)

    def _scale(self) -> None:
        scaler, staying = self._scaler, [each for each in self._replicas if not each.leaving]
        in_flight = len(self._waiting) + sum(each.busy for each in staying)
        needed = min(max(math.ceil(in_flight / scaler.target), self._least), scaler.most)
        self._needed.append((self._now, needed))
        while self._needed[0][0] < self._now - scaler.stays:
            self._needed.popleft()
        if needed > len(staying) and self._now - self._doubled >= scaler.doubles_in:
            self._doubled = self._now
            for _ in range(min(needed, max(2 * len(staying), 1)) - len(staying)):
                self._start()
        elif max(most for _, most in self._needed) < len(staying) and self._now - self._lowered >= scaler.falls_in:
            self._lowered = self._now
            replica = min(staying, key=lambda each: (each.ready <= self._now, each.busy))
            replica.leaving = True
            self._end_if_idle(replica)
        self._at(self._now + scaler.every, self._scale)

    def _end_if_idle(self, replica: _Running) -> None:
        if replica.leaving and not replica.busy:
            self._replicas.remove(replica)
            self.replica_seconds += self._now - replica.began


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pod", type=seconds, default=1.0, help="seconds until a replica's process is executed")
    parser.add_argument("--servers", type=Path, default=SERVERS, help="result of a run of snapcap bench peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    run = json.loads(options.servers.read_text())
    replicas, scaler = measured(run), Autoscaler(pod=options.pod)
    report, rows, results = Report(), [], {}
    for load in LOADS:
        moments = list(load.moments(seed=1))
        cases = {each.title: Fleet(each, scaler, load.replicas).run(moments).figures() for each in replicas}
        rows += [[load.title, title, *map(str.format, FORMATS, each.values())] for title, each in cases.items()]
        results[load.title] = cases
    columns = ["load", "server", "requests", "p50 s", "p99 s", f"past {LATE_S:g} s", "replica hours", "starts"]
    report.add("What a fast start is worth", columns, rows)
    servers = {each.title: {"start": each.start, "lone": each.lone, "rate": each.rate} for each in replicas}
    further = {"servers": servers, "servers_from": f"`{run['command']}` at {run['commit']}", "loads": results}
    report.write(options.json, {}, benchmark="autoscaling", pod_s=options.pod, **further)


if __name__ == "__main__":
    main()
