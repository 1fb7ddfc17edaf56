"""Injects faults of S3 and the cache folder's disk, which a start needs, and of a running server's clock."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from snapcap.benchmarks.soak.faults.processes import Injection, drained
from snapcap.benchmarks.soak.lying_proxy import Lie
from snapcap.benchmarks.soak.replica import Replica
from snapcap.benchmarks.soak.world import Fault, Healed, World

STEP = "+3600s"
NO_STEP = "+0s"
SEEN_S = 2.0  # seconds after which libfaketime has read the file again


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


@asynccontextmanager
async def clock_stepped(world: World, replica: Replica) -> AsyncIterator[Healed]:
    """Moves the time of day of a running server an hour ahead, and back. Its monotonic clock does not change.

    The server is restarted with a clock of its own before, and without it afterwards.
    """
    clock, before = replica.cache.parent / f"{replica.name}.clock", dict(replica.extra)
    clock.write_text(NO_STEP)
    replica.extra |= {**world.clock, "FAKETIME_TIMESTAMP_FILE": str(clock)}
    try:
        async with drained(world, replica) as started:
            while not (started() and await replica.is_ready()):  # noqa: ASYNC110 - the campaign goes on meanwhile
                await asyncio.sleep(0.1)
        clock.write_text(STEP)
        await asyncio.sleep(SEEN_S)
        yield lambda: True
        clock.write_text(NO_STEP)
        await asyncio.sleep(SEEN_S)
    finally:
        replica.extra = before
        async with drained(world, replica):
            pass


STORE_FAULTS = (
    Fault("s3-black-hole", "s3", store_that(Lie.SILENCE)),
    Fault("s3-slow", "s3", store_that(Lie.DELAY)),
    Fault("s3-truncates", "s3", store_that(Lie.CUT)),
    Fault("s3-corrupts", "s3", store_that(Lie.CORRUPTION)),
    Fault("disk-full", "disk", disk_full),
    Fault("disk-read-only", "disk", disk_read_only),
    Fault("clock-stepped", "clock", clock_stepped),
)
