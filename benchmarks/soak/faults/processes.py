"""Injects faults of processes: stopped, so that they hang for ever, killed, and drained."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from snapcap.benchmarks.harness.processes import is_gone
from snapcap.benchmarks.soak.replica import Replica
from snapcap.benchmarks.soak.world import Fault, Healed, World

ENGINE, DECODE_PARENT, FIRST_DECODE = 0, 1, 2  # indexes of `Replica.parts`
Injection = Callable[[World, Replica], AbstractAsyncContextManager[Healed]]


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
        if part is None:
            replica.went_down()
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
    replica.went_down()
    replica.signal(signal.SIGTERM)
    yield lambda: replica.starts > start


PROCESS_FAULTS = (
    Fault("engine-stopped", "processes", signalled(signal.SIGSTOP, ENGINE)),
    Fault("engine-killed", "processes", signalled(signal.SIGKILL, ENGINE)),
    Fault("decode-stopped", "processes", signalled(signal.SIGSTOP, FIRST_DECODE)),
    Fault("decode-killed", "processes", signalled(signal.SIGKILL, FIRST_DECODE)),
    Fault("decode-parent-killed", "processes", signalled(signal.SIGKILL, DECODE_PARENT)),
    Fault("server-stopped", "processes", signalled(signal.SIGSTOP, None)),
    Fault("server-killed", "processes", signalled(signal.SIGKILL, None)),
    Fault("drained", "processes", drained),
)
