"""Simulates replicas that are started and ended as requests need them, event by event (SimPy).

Requests wait in one line, as in a balancer that holds them until a replica has room, and each takes a place of a
replica. An autoscaler looks at what waits and runs every few seconds, as KEDA and the horizontal pod autoscaler
do with `deploy/kubernetes`, and from zero at once, as Knative's activator does.
"""

import math
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Replica:
    """A server as the simulation knows it.

    start: seconds from the moment its process is executed until it is ready. lone: seconds of a request that is
    alone. rate: requests a second at most. places: requests at once, at which it has that rate.
    """

    title: str
    start: float
    lone: float
    rate: float
    places: int

    def seconds(self, together: int) -> float:
        """How long each of so many requests takes that run together."""
        return max(self.lone, together / self.rate)


@dataclass(frozen=True)
class Autoscaler:
    """As `deploy/kubernetes` has it: six in flight a replica, looked at every ten seconds, doubled every fifteen
    seconds at most, and one replica less a minute once fewer were enough for five minutes.

    pod: seconds from the decision until a replica's process is executed, its image being on the node.
    """

    target: float = 6.0
    every: float = 10.0
    doubles_in: float = 15.0
    stays: float = 300.0
    falls_in: float = 60.0
    most: int = 50
    pod: float = 1.0


@dataclass
class Outcome:
    """What the clients and the operator got: seconds of each request, and of replicas in sum."""

    latencies: list[float] = field(default_factory=list)
    replica_seconds: float = 0.0
    starts: int = 0


@dataclass(eq=False)
class _Running:
    """One replica; ``ready`` once it takes requests, ``leaving`` once it is to end."""

    began: float
    ready: bool = False
    leaving: bool = False
    busy: int = 0


class Fleet:
    """The state of one simulation."""

    def __init__(self, kind: Replica, scaler: Autoscaler, least: int) -> None:
        """``least``: replicas that are there always, the first of them from the beginning."""
        self.outcome = Outcome()
        self._kind, self._scaler, self._least = kind, scaler, least
        self._world = simpy.Environment()
        self._waiting: deque[float] = deque()  # the moments at which they came
        self._replicas: list[_Running] = []
        self._needed: deque[tuple[float, int]] = deque()  # of the last minutes: when, and how many replicas

    def run(self, moments: Iterable[float]) -> Outcome:
        """Serve every request; ``moments`` ascend, in seconds."""
        for _ in range(self._least):
            self._replicas.append(_Running(0.0, ready=True))
        arriving = self._world.process(self._arrive(moments))
        self._world.process(self._scale())
        self._world.run(arriving)
        while self._waiting or any(replica.busy for replica in self._replicas):
            self._world.step()
        for replica in self._replicas:
            self._ended(replica)
        return self.outcome

    def _arrive(self, moments: Iterable[float]) -> Process:
        for moment in moments:
            yield self._world.timeout(moment - self._world.now)
            self._waiting.append(moment)
            if not self._replicas:
                self._needed.append((moment, 1))
                self._start()
            self._serve()

    def _serve(self) -> None:
        """Give places to those that wait, those of the replica with the most of them free first."""
        while self._waiting:
            taking = [each for each in self._replicas if each.ready and not each.leaving]
            replica = min(taking, key=lambda each: each.busy, default=None)
            if replica is None or replica.busy >= self._kind.places:
                return
            replica.busy += 1
            self._world.process(self._caption(replica, self._waiting.popleft()))

    def _caption(self, replica: _Running, came: float) -> Process:
        yield self._world.timeout(self._kind.seconds(replica.busy))
        self.outcome.latencies.append(self._world.now - came)
        replica.busy -= 1
        if replica.leaving and not replica.busy:
            self._end(replica)
        self._serve()

    def _start(self) -> None:
        replica = _Running(self._world.now)
        self._replicas.append(replica)
        self.outcome.starts += 1
        self._world.process(self._become_ready(replica))

    def _become_ready(self, replica: _Running) -> Process:
        yield self._world.timeout(self._scaler.pod + self._kind.start)
        replica.ready = True
        self._serve()

    def _scale(self) -> Process:
        scaler = self._scaler
        doubled = lowered = -math.inf
        while True:
            yield self._world.timeout(scaler.every)
            now, staying = self._world.now, [each for each in self._replicas if not each.leaving]
            in_flight = len(self._waiting) + sum(each.busy for each in staying)
            needed = min(max(math.ceil(in_flight / scaler.target), self._least), scaler.most)
            self._needed.append((now, needed))
            while self._needed[0][0] < now - scaler.stays:
                self._needed.popleft()
            if needed > len(staying) and now - doubled >= scaler.doubles_in:
                doubled = now
                for _ in range(min(needed, max(2 * len(staying), 1)) - len(staying)):
                    self._start()
            elif max(count for _, count in self._needed) < len(staying) and now - lowered >= scaler.falls_in:
                lowered = now
                self._leave(min(staying, key=lambda each: (each.ready, each.busy)))

    def _leave(self, replica: _Running) -> None:
        replica.leaving = True
        if not replica.busy:
            self._end(replica)

    def _end(self, replica: _Running) -> None:
        self._replicas.remove(replica)
        self._ended(replica)

    def _ended(self, replica: _Running) -> None:
        self.outcome.replica_seconds += self._world.now - replica.began
