"""Injects the faults of a soak: of processes, stores, disks and clients."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from snapcap.benchmarks.harness.processes import descendants, is_gone
from snapcap.benchmarks.harness.workload import samples
from snapcap.benchmarks.soak.clients import BadClients, leave, status_of
from snapcap.benchmarks.soak.servers import Lie, LyingProxy, Replica, lone_request

ENGINE, DECODE_PARENT, FIRST_DECODE = 0, 1, 2  # indexes of `Replica.parts`
Healed = Callable[[], bool]
STALLED, STALL_S = 200, 5.0
LEAVING = 300
FLOOD = 400


@dataclass(frozen=True)
class World:
    """Everything that a fault can reach. ``proxy`` is None if the servers have no store but their own folders."""

    replicas: Sequence[Replica]
    proxy: LyingProxy | None
    bad: BadClients
    chooser: Random


Injection = Callable[[World, Replica], AbstractAsyncContextManager[Healed]]


@dataclass(frozen=True)
class Fault:
    """A fault.

    kind: the requirement of the fault, by which `__main__` leaves it out where it cannot be injected.
    inject: injects the fault into one server, yields a function that tells whether the broken part has recovered,
        and removes the fault.
    """

    name: str
    kind: str
    inject: Injection


def signalled(number: int, part: int | None) -> Injection:
    """Returns a fault that sends a signal to a part of the server, or to the process that answers if ``part`` is
    None.

    A stopped process is never continued. The server has recovered when this process is gone, and there are as many
    parts as before.
    """

    @asynccontextmanager
    async def inject(_: World, replica: Replica) -> AsyncIterator[Healed]:
        before = replica.parts
        pid = replica.pid if part is None else before[part]
        os.kill(pid, number)

        def healed() -> bool:
            try:
                return is_gone(pid) and len(replica.parts) >= (len(before) if part != DECODE_PARENT else 1)
            except RuntimeError:
                return False

        yield healed

    return inject


@asynccontextmanager
async def drained(_: World, replica: Replica) -> AsyncIterator[Healed]:
    """Drains the server, as a rolling update does."""
    start = replica.starts
    replica.signal(signal.SIGTERM)
    yield lambda: replica.starts > start


@asynccontextmanager
async def model_killed(world: World, replica: Replica) -> AsyncIterator[Healed]:
    """Kills a process of a model that wakes, is ready or leaves, or an engine process in reserve."""
    born = descendants(replica.pid)
    pid = world.chooser.choice(born) if born else 0
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    yield lambda: not pid or is_gone(pid)


PROCESS_FAULTS = (
    Fault("engine-stopped", "parts", signalled(signal.SIGSTOP, ENGINE)),
    Fault("engine-killed", "parts", signalled(signal.SIGKILL, ENGINE)),
    Fault("decode-stopped", "parts", signalled(signal.SIGSTOP, FIRST_DECODE)),
    Fault("decode-killed", "parts", signalled(signal.SIGKILL, FIRST_DECODE)),
    Fault("decode-parent-killed", "parts", signalled(signal.SIGKILL, DECODE_PARENT)),
    Fault("server-stopped", "processes", signalled(signal.SIGSTOP, None)),
    Fault("server-killed", "processes", signalled(signal.SIGKILL, None)),
    Fault("drained", "processes", drained),
    Fault("model-killed", "models", model_killed),
)


def store_that(lie: Lie) -> Injection:
    """Returns a fault that starts a server without a cache, while the store's proxy applies ``lie``."""

    @asynccontextmanager
    async def inject(world: World, replica: Replica) -> AsyncIterator[Healed]:
        if world.proxy is None:
            raise RuntimeError("there is no store")
        world.proxy.lie = lie
        try:
            replica.empty_cache()
            async with drained(world, replica) as healed:
                yield healed
        finally:
            world.proxy.lie = Lie.NONE

    return inject


@asynccontextmanager
async def disk_full(world: World, replica: Replica) -> AsyncIterator[Healed]:
    """Starts a server with an empty cache folder, on a disk without a free byte."""
    filler = replica.cache / "filler"
    replica.empty_cache()
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * (1 << 16)):
                pass
        async with drained(world, replica) as healed:
            yield healed
    finally:
        filler.unlink(missing_ok=True)


@asynccontextmanager
async def disk_read_only(world: World, replica: Replica) -> AsyncIterator[Healed]:
    """Starts a server with a read-only cache folder, like a volume whose file system has an error."""
    remount(replica.cache, "ro")
    try:
        async with drained(world, replica) as healed:
            yield healed
    finally:
        remount(replica.cache, "rw")


def remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True, capture_output=True)


STORE_FAULTS = (
    Fault("s3-black-hole", "s3", store_that(Lie.SILENCE)),
    Fault("s3-slow", "s3", store_that(Lie.DELAY)),
    Fault("s3-truncates", "s3", store_that(Lie.CUT)),
    Fault("s3-corrupts", "s3", store_that(Lie.CORRUPTION)),
    Fault("disk-full", "disk", disk_full),
    Fault("disk-read-only", "disk", disk_read_only),
)


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


FAULTS = (*PROCESS_FAULTS, *STORE_FAULTS, *CLIENT_FAULTS)
