"""Injects faults of a GPU: a kernel that asserts in the engine's context, and memory that another process takes."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from snapcap.benchmarks.soak.faults.processes import ENGINE, drained, signalled
from snapcap.benchmarks.soak.replica import Replica
from snapcap.benchmarks.soak.world import Fault, Healed, World

HELD_S = 8.0
# Takes all free memory, in ever smaller pieces.
_TAKE = """
import sys, time, torch
held, size = [], 1 << 34
while size >= 1 << 20:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        size >>= 1
print("held", flush=True)
time.sleep(float(sys.argv[1]))
"""


@asynccontextmanager
async def taker(seconds: float) -> AsyncIterator[None]:
    """Runs a process that holds all free memory of the device."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _TAKE, str(seconds), stdout=pipe)
    if process.stdout is None or await process.stdout.readline() != b"held\n":
        raise RuntimeError("the device's memory cannot be taken")
    try:
        yield
    finally:
        await process.wait()


@asynccontextmanager
async def memory_taken(_: World, __: Replica) -> AsyncIterator[Healed]:
    """Takes the device's memory while both servers caption."""
    async with taker(HELD_S):
        yield lambda: True


@asynccontextmanager
async def memory_taken_at_start(world: World, replica: Replica) -> AsyncIterator[Healed]:
    """Starts a server while no device memory is free. The server is started again until there is some."""
    async with drained(world, replica) as healed, taker(HELD_S):
        yield healed


GPU_FAULTS = (
    Fault("gpu-kernel-asserts", "gpu", signalled(signal.SIGUSR2, ENGINE)),
    Fault("gpu-memory-taken", "gpu", memory_taken),
    Fault("gpu-memory-taken-at-start", "gpu", memory_taken_at_start),
)
