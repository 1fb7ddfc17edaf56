"""Defines a fault, and the world it can reach: the servers, the store's proxy, and the files beside them.

The module is the interface between the campaign and the faults, which both import it.
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
