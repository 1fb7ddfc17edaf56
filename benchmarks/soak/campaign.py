"""Injects faults one after the other, each once and then at random, and measures the effects of each."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random

from rich.console import Console

from snapcap.benchmarks.harness.watching import ServerWatch
from snapcap.benchmarks.soak.balancer import LyingProxy
from snapcap.benchmarks.soak.clients import BadClients, GoodClients, captions_rightly, requests
from snapcap.benchmarks.soak.replica import MEMORY_S, Replica

Healed = Callable[[], bool]
RECOVERY_LIMIT_S = 180.0
QUIET_S = 2.0  # between two faults
START_LIMIT_S = 300.0


@dataclass(frozen=True)
class World:
    """Everything that a fault can reach.

    proxy: the store's proxy. None if the servers have no store but their own folders.
    clock: environment variables that give a server a clock of its own, which a file sets.
    """

    replicas: Sequence[Replica]
    proxy: LyingProxy | None
    clock: Mapping[str, str]
    bad: BadClients
    chooser: Random


@dataclass(frozen=True)
class Fault:
    """A fault.

    kind: the requirement of the fault, by its name in `Setting.unavailable`.
    inject: injects the fault into one server, yields a function that tells whether the broken part has recovered,
        and removes the fault.
    """

    name: str
    kind: str
    inject: Callable[[World, Replica], AbstractAsyncContextManager[Healed]]


@dataclass(frozen=True)
class Strike:
    """A fault that was injected.

    at: seconds since the campaign's beginning.
    recovered: seconds until the server was ready, captioned rightly, and had recovered the broken part. None if it
        took longer than the limit.
    livez: worst latency of /livez of all servers while they were up, in seconds.
    control: worst latency of the servers that do nothing, in seconds.
    peak: memory of the largest server, in bytes.
    """

    fault: str
    replica: str
    at: float
    recovered: float | None
    requests: int
    retried: int
    lost: int
    wrong: int
    livez: float
    control: float
    peak: int
    problem: str = ""


class Campaign:
    """A campaign of faults. ``watches`` has each server's watch, by its name."""

    def __init__(
        self, world: World, clients: GoodClients, watches: Mapping[str, ServerWatch], console: Console
    ) -> None:
        self.strikes: list[Strike] = []
        self._world = world
        self._clients = clients
        self._watches = watches
        self._console = console
        self._requests = requests()
        self._began = time.monotonic()

    async def run(self, faults: Sequence[Fault], seconds: float) -> None:
        """Injects each fault once, however long that takes, and then faults at random until the time is over."""
        chooser, end = self._world.chooser, time.monotonic() + seconds
        turns = chooser.sample(faults, len(faults))
        while turns or time.monotonic() < end:
            await asyncio.sleep(QUIET_S)
            await self.all_well()  # only one fault at a time: with both servers down, no retry can succeed
            if turns:
                await self._strike(turns.pop())
            elif faults:
                await self._strike(chooser.choice(faults))

    async def all_well(self, limit: float = START_LIMIT_S) -> bool:
        """Returns whether every server is ready and captions rightly, within ``limit`` seconds."""
        found = await asyncio.gather(*(self._recovery(each, lambda: True, limit) for each in self._world.replicas))
        return all(seconds is not None for seconds in found)

    async def _strike(self, fault: Fault) -> None:
        replica = self._world.chooser.choice(self._world.replicas)
        before, began, problem = self._clients.tally.snapshot(), time.monotonic(), ""
        recovered: float | None = None
        try:
            async with fault.inject(self._world, replica) as healed:
                recovered = await self._recovery(replica, healed, RECOVERY_LIMIT_S)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if recovered is None:
            # The campaign goes on. Killing the container also removes the rest of the fault.
            replica.went_down()
            replica.kill()
            await self._recovery(replica, lambda: True, RECOVERY_LIMIT_S)
        ended, after = time.monotonic(), self._clients.tally
        strike = Strike(
            fault.name,
            replica.name,
            began - self._began,
            recovered,
            after.requests - before.requests,
            after.retried - before.retried,
            after.lost - before.lost,
            after.wrong - before.wrong,
            self.worst("livez", began, ended),
            self.worst("control", began, ended),
            peak(self._world.replicas, began, ended),
            problem,
        )
        self.strikes.append(strike)
        told = "NOT RECOVERED" if recovered is None else f"{recovered:.1f} s"
        self._console.print(
            f"{strike.at:6.0f} s  {fault.name} on {replica.name}: {told} {problem}", highlight=False
        )

    async def _recovery(self, replica: Replica, healed: Healed, limit: float) -> float | None:
        """Returns the seconds until a server has recovered the broken part, is ready and captions rightly. None
        after ``limit``."""
        began = time.monotonic()
        while time.monotonic() - began < limit:
            if healed() and await replica.is_ready() and await captions_rightly(replica.port, self._requests):
                return time.monotonic() - began
            await asyncio.sleep(0.1)
        return None

    def worst(self, kind: str, began: float, ended: float) -> float:
        """Returns the longest answered probe of a kind. For `livez`, only probes while the server was up count."""
        values = [0.0]
        for replica in self._world.replicas:
            for probe in self._watches[replica.name].probes(began, ended):
                up = any(since <= probe.began and probe.began + probe.value <= until for since, until in replica.up)
                if probe.kind == kind and (up or kind != "livez"):
                    values.append(probe.value)
        return max(values)


def peak(replicas: Sequence[Replica], began: float, ended: float) -> int:
    """Returns the memory of the largest server between two moments, in bytes."""
    found = [value for each in replicas for at, value in each.memory if began - 2 * MEMORY_S <= at <= ended]
    return max(found, default=0)


@contextlib.contextmanager
def watched(replicas: Sequence[Replica], interval: float = 0.05) -> Iterator[dict[str, ServerWatch]]:
    """Yields a watch over each server, by its name. ``interval`` is the seconds between two probes."""
    with contextlib.ExitStack() as exits:
        yield {each.name: exits.enter_context(ServerWatch(each.port, interval=interval)) for each in replicas}
