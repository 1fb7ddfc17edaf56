"""Injects faults of many clients at once, straight into one server: they stall, they leave, they flood."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from snapcap.benchmarks.harness.common import samples
from snapcap.benchmarks.soak.asking import lone_request
from snapcap.benchmarks.soak.bad_clients import leave, status_of
from snapcap.benchmarks.soak.replica import Replica
from snapcap.benchmarks.soak.world import Fault, Healed, World

STALLED, STALL_S = 200, 5.0
LEAVING = 300
FLOOD = 400


def good_request() -> bytes:
    return lone_request("/v1/caption", next(iter(samples().values()))[0], "image/png")


@asynccontextmanager
async def stalled(_: World, replica: Replica) -> AsyncIterator[Healed]:
    """Sends half a body from each client, and nothing more."""
    half = good_request()[:-100]
    stalling = asyncio.gather(*(leave(replica.port, half, STALL_S) for _ in range(STALLED)))
    yield lambda: True
    await stalling


@asynccontextmanager
async def left(_: World, replica: Replica) -> AsyncIterator[Healed]:
    """Sends a whole request from each client, which leaves before the reply."""
    leaving = asyncio.gather(*(leave(replica.port, good_request(), turn % 10 / 100) for turn in range(LEAVING)))
    yield lambda: True
    await leaving


@asynccontextmanager
async def flooded(world: World, replica: Replica) -> AsyncIterator[Healed]:
    """Sends many times more good requests than the queue holds."""
    asking = asyncio.gather(*(status_of(replica.port, good_request(), 60.0) for _ in range(FLOOD)))
    yield asking.done
    world.bad.answered.update(await asking)


CLIENT_FAULTS = (
    Fault("clients-stall", "clients", stalled),
    Fault("clients-leave", "clients", left),
    Fault("clients-flood", "clients", flooded),
)
