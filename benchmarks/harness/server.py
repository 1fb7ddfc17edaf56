"""Runs measured processes and servers, with a clock that runs from just before they are spawned."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, TextIO

from snapcap.benchmarks.harness.common import ROOT, environment, free_port
from snapcap.benchmarks.harness.http_probe import Connection, Reply

START_LIMIT_S = 600.0


@dataclass(frozen=True)
class Endpoint:
    """The paths of a server: of a caption, and of readiness where it has one."""

    caption: str
    ready: str | None


SNAPCAP_API = Endpoint("/v1/caption", "/readyz")


class Measured(NamedTuple):
    """When a process was spawned, on `time.monotonic`, and the lines that it has written."""

    spawned: float
    lines: list[str]


def spawn(
    command: Sequence[str], log: IO[Any], extra: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process that leads a group of its own and writes to a file."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**(extra or {})),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


class Process:
    """A child whose output goes to a file; seconds are counted from just before it was spawned."""

    def __init__(self, command: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        self._log: TextIO = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by stop
        self.spawned = time.monotonic()
        self._process = spawn(command, self._log, extra)

    @property
    def pid(self) -> int:
        return self._process.pid

    def seconds(self) -> float:
        return time.monotonic() - self.spawned

    def log(self) -> str:
        """What it has written so far."""
        with open(f"/proc/self/fd/{self._log.fileno()}", errors="replace") as log:
            return log.read()

    def wait(self, limit: float) -> None:
        """Until it has ended well.

        Raises:
            RuntimeError: it ended otherwise, or not within ``limit`` seconds.
        """
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {limit:.0f} s: {self.last_line()}") from None
        if self._process.returncode:
            raise RuntimeError(f"ended with status {self._process.returncode}: {self.last_line()}")

    def check(self) -> None:
        """Raises RuntimeError where the process has ended, or has taken far too long."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended with status {self._process.returncode}:\n{self.log()}")
        if self.seconds() > START_LIMIT_S:
            raise RuntimeError(f"the server was not ready after {START_LIMIT_S:.0f} s: {self.last_line()}")

    def last_line(self) -> str:
        """The end of its output: of a trace, the error."""
        lines = [line for line in self.log().splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it has written nothing"

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what does not go, its children included."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def run_measured(command: Sequence[str], limit: float, extra: Mapping[str, str] | None = None) -> Measured:
    """Run a command that ends by itself.

    Raises:
        RuntimeError: it failed, or took longer than ``limit`` seconds.
    """
    process = Process(command, extra)
    try:
        process.wait(limit)
        return Measured(process.spawned, process.log().splitlines())
    finally:
        process.stop()


class Server(Process):
    """A server process on a free port."""

    def __init__(
        self, command: Sequence[str], api: Endpoint = SNAPCAP_API, extra: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.api = api
        super().__init__([*command, "--port", str(self.port)], extra)

    def connect(self) -> Connection:
        """A connection as soon as the port is bound."""
        while True:
            try:
                return Connection(self.port, START_LIMIT_S)
            except ConnectionRefusedError:
                self.check()
                time.sleep(0.002)

    def wait_ready(self, connection: Connection) -> None:
        """Until readiness answers 200; a server without such a path is ready when its port is bound."""
        while self.api.ready is not None and connection.request(self.api.ready).status != 200:
            self.check()
            time.sleep(0.005)

    def caption(self, connection: Connection, image: bytes) -> Reply:
        reply = connection.request(self.api.caption, image)
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.body.decode()}\n{self.log()}")
        return reply

    def get(self, path: str) -> Reply:
        connection = self.connect()
        try:
            return connection.request(path)
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """/metrics: values by the full sample name, labels included; empty for a peer."""
        if self.api is not SNAPCAP_API:
            return {}
        lines = self.get("/metrics").body.decode().splitlines()
        fields = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in fields}


@contextlib.contextmanager
def serving(
    command: Sequence[str], api: Endpoint = SNAPCAP_API, extra: Mapping[str, str] | None = None
) -> Iterator[Server]:
    server = Server(command, api, extra)
    try:
        yield server
    finally:
        server.stop()
