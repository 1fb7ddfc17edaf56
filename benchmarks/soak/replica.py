"""Keeps one server as Kubernetes does: restarts it when it ends, and ends it when /livez does not answer.

The numbers are those of `deploy/kubernetes`: three failed probes of /livez in a row, ten seconds apart, five
seconds each.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from snapcap.benchmarks.harness.processes import own_parts, tree_memory
from snapcap.benchmarks.harness.server import request_bytes, spawn
from snapcap.benchmarks.harness.workload import free_port

# Builds a request whose connection is closed after the reply.
lone_request = partial(request_bytes, close=True)
LIVENESS_PERIOD_S = 10.0
LIVENESS_TIMEOUT_S = 5.0
LIVENESS_FAILURES = 3
TERMINATION_S = 45.0
BACK_OFF_S = 0.5
MEMORY_S = 0.5


class CutError(ConnectionError):
    """The connection was lost after the reply had begun."""


@dataclass(frozen=True)
class Reply:
    """A reply. ``raw`` holds all of its bytes."""

    status: int
    fields: Mapping[str, str]
    body: bytes
    raw: bytes

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the server asks to retry, or None."""
        text = self.fields.get("retry-after", "")
        return float(text) if text.isdecimal() else None


async def ask(port: int, request: bytes, within: float) -> Reply:
    """Sends a whole request and returns its reply.

    Raises:
        CutError: the connection was lost after the reply had begun.
        OSError: the connection was refused, or lost before.
        TimeoutError: there was no whole reply ``within`` seconds.
    """
    async with asyncio.timeout(within):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            return await _reply(reader)
        finally:
            writer.close()


async def _reply(reader: asyncio.StreamReader) -> Reply:
    begun = False
    try:
        line = await reader.readuntil(b"\r\n")
        begun = True
        rest = await reader.readuntil(b"\r\n\r\n")
        fields = {}
        for each in rest.decode("latin-1").split("\r\n"):
            name, _, value = each.partition(":")
            fields[name.strip().lower()] = value.strip()
        body = await reader.readexactly(int(fields.get("content-length", "0")))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        if begun:
            raise CutError("the reply was cut") from error
        raise ConnectionResetError("no reply") from error
    return Reply(int(line.split()[1]), fields, body, line + rest + body)


class Replica:
    """A server that is kept running.

    cache: its own cache folder.
    starts: number of its processes so far.
    up: beginning and end of each time in which it was ready. The last end may be open.
    """

    def __init__(self, name: str, command: Sequence[str], extra: Mapping[str, str], cache: Path) -> None:
        self.name = name
        self.port = free_port()
        self.cache = cache
        self.starts = 0
        self.exits: list[int] = []
        self.up: list[list[float]] = []
        self.memory: list[tuple[float, int]] = []
        self.extra = {"PYTHONFAULTHANDLER": "1", **extra}  # environment variables, from the next start on
        self._command = [*command, "--port", str(self.port), "--cache-dir", str(cache)]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the replica
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

    @property
    def parts(self) -> list[int]:
        """The process ids of the engine process, the parent of the decode processes, and these."""
        return own_parts(self.pid)

    def start(self) -> None:
        jobs = (self._supervise(), self._look_for_life(), self._note_ready(), self._sample_memory())
        self._tasks = [asyncio.create_task(job) for job in jobs]

    async def stop(self) -> None:
        self._over = True
        self.signal(signal.SIGTERM)
        supervisor, *others = self._tasks
        for task in others:
            task.cancel()
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

    def went_down(self) -> None:
        """Records that the server is down from now on, until it is ready again."""
        if self.up and self.up[-1][1] == float("inf"):
            self.up[-1][1] = time.monotonic()

    def empty_cache(self) -> None:
        for entry in self.cache.iterdir():
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()

    def log(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - 200_000, 0))
        return self._log.read().decode(errors="replace")

    async def is_ready(self) -> bool:
        with contextlib.suppress(OSError, TimeoutError):
            return (await ask(self.port, lone_request("/readyz"), 2.0)).status == 200
        return False

    async def _supervise(self) -> None:
        while not self._over:
            self.cache.mkdir(parents=True, exist_ok=True)
            self._process = spawn(self._command, self._log, self.extra)
            self.starts += 1
            group = self._process.pid
            code = await asyncio.to_thread(self._process.wait)
            self.exits.append(code)
            self.went_down()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)  # a container ends with its first process
            await asyncio.sleep(BACK_OFF_S)

    async def _look_for_life(self) -> None:
        failures, start = 0, 0
        while True:
            await asyncio.sleep(LIVENESS_PERIOD_S)
            if start != self.starts:
                failures, start = 0, self.starts
            try:
                alive = (await ask(self.port, lone_request("/livez"), LIVENESS_TIMEOUT_S)).status == 200
            except (OSError, TimeoutError):
                alive = False
            failures = 0 if alive else failures + 1
            if failures >= LIVENESS_FAILURES:
                failures = 0
                await self._terminate()

    async def _terminate(self) -> None:
        start = self.starts
        self.signal(signal.SIGTERM)
        end = time.monotonic() + TERMINATION_S
        while self.starts == start and time.monotonic() < end:  # noqa: ASYNC110 - the loop has a time limit
            await asyncio.sleep(0.2)
        if self.starts == start:
            self.kill()

    async def _note_ready(self) -> None:
        seen = 0
        while True:
            start = self.starts
            if seen != start and await self.is_ready() and start == self.starts:
                seen = start
                self.up.append([time.monotonic(), float("inf")])
            await asyncio.sleep(0.1)

    async def _sample_memory(self) -> None:
        while True:
            with contextlib.suppress(RuntimeError):
                self.memory.append((time.monotonic(), await asyncio.to_thread(tree_memory, self.pid)))
            await asyncio.sleep(MEMORY_S)
