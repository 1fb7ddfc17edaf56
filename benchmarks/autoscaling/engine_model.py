"""Simulates one snapcap server request by request: what its processes do, and that they share the CPUs.

    client ─ HTTP ─ image ─ queue ─ [ encode ─ step ─ step ─ … ] ─ HTTP ─ client
    one      one    some            one thread for all rows         one    one

The load generator, the HTTP process and the engine do one thing at a time, each; some images are decoded at once.
The engine works in turns, as `service/engine/engine.py` does: admit what waits, encode it, one decode step for all
rows, until a row has its last token. An encode and a step take as long as their bucket does, however few rows it
has, and a request that comes meanwhile waits for the end of the turn. All of it is CPU time that was measured, and
is stretched where more threads have work than there are CPUs. Nothing is fitted to the latencies that come out.
"""

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from snapcap.benchmarks.autoscaling.cpus import Cpus
from snapcap.service.engine.scheduler import MOST_STEPS_HELD
from snapcap.warmup.plan.buckets import BucketTable

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class ServerCosts:
    """CPU seconds of a server, as they were measured; see `calibrate`.

    encode, step: of an encode and of a decode step, by bucket. turn: of the engine besides, a turn. http, image,
    client: of the HTTP process, of decoding an image, and of the load generator, a request. hand_over: seconds from
    one process to the next, in which none of them works. decoders: images that are decoded at once. others: threads
    of other programs that have work on these CPUs, on average.
    """

    encode: Mapping[int, float]
    step: Mapping[int, float]
    turn: float
    http: float
    image: float
    client: float
    hand_over: float
    cpus: int
    decoders: int
    others: float = 0.0

    def lone(self, steps: int) -> float:
        """Seconds of a request of so many decode steps that is alone."""
        engine = self.encode[min(self.encode)] + steps * (self.step[min(self.step)] + self.turn)
        return self.http + self.image + self.client + engine + self.hand_over


@dataclass
class _Row:
    """A request on its way: how many decode steps it still needs, and when the engine is through with it."""

    steps: int
    done: simpy.Event
    tokens: int = field(default=0)


class ServerModel:
    """One server, and the load generator beside it."""

    def __init__(self, costs: ServerCosts, steps: Sequence[int]) -> None:
        """``steps``: decode steps of the images' captions, which are asked for one after the other, and again."""
        self._costs, self._steps = costs, steps
        self._table = BucketTable.of(tuple(costs.encode))
        self._world = simpy.Environment()
        self._cpus = Cpus(self._world, costs.cpus, costs.others)
        self._client = simpy.Resource(self._world)
        self._http = simpy.Resource(self._world)
        self._decoders = simpy.Resource(self._world, costs.decoders)
        self._waiting: deque[_Row] = deque()
        self._came = self._world.event()
        self._held = 0

    def open_loop(self, moments: Iterable[float]) -> list[float]:
        """Seconds of each request that is due at these moments, which ascend."""
        latencies: list[float] = []
        self._world.process(self._run_engine())
        self._world.run(self._world.process(self._ask_all(list(moments), latencies)))
        return latencies

    def closed_loop(self, clients: int, requests: int) -> float:
        """Requests a second of so many clients, each of which asks again when it has its answer."""
        latencies: list[float] = []
        self._world.process(self._run_engine())
        turns = iter(range(requests))

        def client() -> Process:
            for turn in turns:
                yield self._world.process(self._request(turn, latencies))

        self._world.run(simpy.AllOf(self._world, [self._world.process(client()) for _ in range(clients)]))
        return requests / self._world.now

    def _ask_all(self, moments: list[float], latencies: list[float]) -> Process:
        asked = []
        for turn, moment in enumerate(moments):
            yield self._world.timeout(moment - self._world.now)
            asked.append(self._world.process(self._request(turn, latencies)))
        yield simpy.AllOf(self._world, asked)

    def _request(self, turn: int, latencies: list[float]) -> Process:
        costs, due = self._costs, self._world.now
        yield from self._work(self._client, costs.client / 2)
        yield from self._work(self._http, costs.http / 2)
        yield from self._work(self._decoders, costs.image)
        yield self._world.timeout(costs.hand_over)
        row = _Row(self._steps[turn % len(self._steps)], self._world.event())
        self._waiting.append(row)
        if not self._came.triggered:
            self._came.succeed()
        yield row.done
        yield from self._work(self._http, costs.http / 2)
        yield from self._work(self._client, costs.client / 2)
        latencies.append(self._world.now - due)

    def _work(self, who: simpy.Resource, seconds: float) -> Process:
        with who.request() as turn:
            yield turn
            yield self._cpus.work(seconds)

    def _run_engine(self) -> Process:
        costs, running = self._costs, list[_Row]()
        while True:
            if not running and not self._waiting:
                self._came = self._world.event()
                yield self._came
            admitted = self._admit(len(running))
            running += admitted
            work = costs.turn + costs.step[self._table.fit(len(running)).size]
            if admitted:
                work += costs.encode[self._table.fit(len(admitted)).size]
            yield self._cpus.work(work)
            for row in running:
                row.tokens += 1
                if row.tokens >= row.steps:
                    row.done.succeed()
            running = [row for row in running if row.tokens < row.steps]

    def _admit(self, running: int) -> list[_Row]:
        """As `Scheduler.admit` does for requests of one row each."""
        largest = self._table.largest.size
        free, waiting = largest - running, len(self._waiting)
        batch = max((size for size in self._table.sizes if 2 * size <= largest), default=1)
        if 0 < free < batch <= waiting:
            self._held += 1
            if self._held <= MOST_STEPS_HELD:
                return []
        else:
            self._held = 0
        fitting = min(free, waiting)
        count = self._table.admit(fitting) if fitting else 0
        return [self._waiting.popleft() for _ in range(count)]
