"""Keeps servers running as Kubernetes does, sends them requests, and runs a proxy before their store.

A server is started again when it ends, and ended when /livez does not answer, with the numbers of
`deploy/kubernetes`: three failed probes of /livez in a row, ten seconds apart, five seconds each.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from snapcap.benchmarks.harness.processes import tree_memory
from snapcap.benchmarks.harness.server import AsyncConnection, Reply, request_bytes, spawn
from snapcap.benchmarks.harness.workload import free_port

LIVENESS_PERIOD_S = 10.0
LIVENESS_TIMEOUT_S = 5.0
LIVENESS_FAILURES = 3
TERMINATION_S = 45.0
BACK_OFF_S = 0.5
DELAY_S = 0.5  # for each piece that a slow store sends
PIECE = 1 << 16


async def ask(port: int, request: bytes, within: float) -> Reply:
    """Sends a whole request on a connection of its own and returns its reply. Without a whole reply ``within``
    seconds, the status is 0 and the body has the reason."""
    try:
        async with asyncio.timeout(within):
            connection = await AsyncConnection.open(port)
            try:
                return await connection.ask(request)
            finally:
                connection.close()
    except (OSError, TimeoutError, ValueError, asyncio.LimitOverrunError) as error:
        return Reply(0, f"{type(error).__name__}: {error}".encode(), {})


class Replica:
    """A server that is kept running.

    cache: its own cache folder.
    starts: number of its processes so far.
    memory_mib: memory of the server's processes together, after each fault.
    """

    def __init__(self, name: str, command: Sequence[str], extra: Mapping[str, str], cache: Path) -> None:
        self.name = name
        self.port = free_port()
        self.cache = cache
        self.starts = 0
        self.exits: list[int] = []
        self.memory_mib: list[int] = []
        self._extra = {"PYTHONFAULTHANDLER": "1", **extra}
        self._command = [*command, "--port", str(self.port), "--cache-dir", str(cache)]
        self._process: subprocess.Popen[bytes] | None = None
        self.log = cache.with_suffix(".log")
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """Process id of the process that answers.

        Raises:
            RuntimeError: there is none at the moment.
        """
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process.pid

    def start(self) -> None:
        self._tasks = [asyncio.create_task(job) for job in (self._supervise(), self._look_for_life())]

    async def stop(self) -> None:
        self._over = True
        self.signal(signal.SIGTERM)
        supervisor, probes = self._tasks
        probes.cancel()
        try:
            await asyncio.wait_for(asyncio.shield(supervisor), TERMINATION_S)
        except TimeoutError:
            self.kill()
            await supervisor

    def signal(self, number: int) -> None:
        with contextlib.suppress(RuntimeError, ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the server's whole process group, as a container's runtime does."""
        with contextlib.suppress(RuntimeError, ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def empty_cache(self) -> None:
        for entry in self.cache.iterdir():
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()

    def sample_memory(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.memory_mib.append(tree_memory(self.pid) >> 20)

    async def _supervise(self) -> None:
        while not self._over:
            self.cache.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._process = spawn(self._command, log, self._extra)
            self.starts += 1
            group = self._process.pid
            self.exits.append(await asyncio.to_thread(self._process.wait))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)  # a container ends with its first process
            await asyncio.sleep(BACK_OFF_S)

    async def _look_for_life(self) -> None:
        failures, start = 0, 0
        while True:
            await asyncio.sleep(LIVENESS_PERIOD_S)
            if start != self.starts:
                failures, start = 0, self.starts
            alive = await ask(self.port, request_bytes("/livez"), LIVENESS_TIMEOUT_S)
            failures = 0 if alive.status == 200 else failures + 1
            if failures == LIVENESS_FAILURES:
                self.signal(signal.SIGTERM)
                await asyncio.sleep(TERMINATION_S)
                if self.starts == start:
                    self.kill()


class Lie(Enum):
    """A treatment of the store's bytes."""

    NONE = "passes on"
    SILENCE = "black hole"
    DELAY = "slow"
    CUT = "truncates"
    CORRUPTION = "corrupts"


class LyingProxy:
    """A proxy before the store. ``lie`` may be changed at any time, and applies to each later piece."""

    def __init__(self, store_port: int, chooser: random.Random) -> None:
        self.lie = Lie.NONE
        self.port = 0
        self._store_port = store_port
        self._chooser = chooser
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self._store_port)
            asks = asyncio.create_task(self._pass_on(reader, store_writer, lies=False))
            with contextlib.suppress(OSError):
                await self._pass_on(store_reader, writer, lies=True)
            asks.cancel()
            store_writer.close()
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, lies: bool) -> None:
        while piece := await reader.read(PIECE):
            while lies and self.lie is Lie.SILENCE:  # noqa: ASYNC110 - until somebody changes it
                await asyncio.sleep(0.1)
            lie = self.lie if lies else Lie.NONE
            is_cut = lie is Lie.CUT and len(piece) > 1000
            if lie is Lie.DELAY:
                await asyncio.sleep(DELAY_S)
            elif is_cut:
                piece = piece[: len(piece) // 2]
            elif lie is Lie.CORRUPTION and len(piece) > 1000:
                piece = self._corrupted(piece)
            writer.write(piece)
            await writer.drain()
            if is_cut:
                return

    def _corrupted(self, piece: bytes) -> bytes:
        """Returns the piece with one bit of its second half flipped, so the head of a reply stays intact."""
        changed = bytearray(piece)
        changed[self._chooser.randrange(len(piece) // 2, len(piece))] ^= 1 << self._chooser.randrange(8)
        return bytes(changed)
