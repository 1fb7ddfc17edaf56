"""Defines a fault, and the world it can reach: the servers, the store's proxy, and the files beside them.

It is the protocol between the campaign and the faults, which both import it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random

from snapcap.benchmarks.soak.bad_clients import BadClients
from snapcap.benchmarks.soak.lying_proxy import LyingProxy
from snapcap.benchmarks.soak.replica import Replica

Healed = Callable[[], bool]


@dataclass(frozen=True)
class World:
    """``proxy`` None: the servers have no store but their own folders. ``clock``: the environment in which
    a server has a clock of its own, whose steps come from a file."""

    replicas: Sequence[Replica]
    proxy: LyingProxy | None
    clock: Mapping[str, str]
    bad: BadClients
    chooser: Random


@dataclass(frozen=True)
class Fault:
    """``inject`` does it to one server, yields whether what it broke is there again, and takes it back. ``kind``:
    of what must be there for it, as `Setting.unavailable` has it."""

    name: str
    kind: str
    inject: Callable[[World, Replica], AbstractAsyncContextManager[Healed]]
