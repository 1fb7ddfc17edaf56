"""Watches a server from a process of its own: latencies of /livez on fresh connections, and memory.

    python tests/support/attacks/watching.py --port 8000 [--pid 4242] [--interval 0.01]

The line `on` on standard input begins the observations, the line `off` ends them, and the program ends with its
input. Each observation is a JSON line, `[kind, began, value]`. `began` is CLOCK_MONOTONIC, which all processes
share. There are five kinds:

- `livez`: seconds until the whole reply.
- `failed`: seconds of a probe without a reply of status 200.
- `control`: seconds until the whole reply of a server that does nothing, in a third process, which is the latency
  that the machine alone adds at that moment.
- `stretch`: how many times longer than its CPU time a little work took, in a fourth process, which is the inverse
  of the share of a CPU that the machine gives.
- `memory`: bytes of the process and all its descendants.

The watcher is a separate process, because the interpreter lock of the measuring process would be part of each
latency. The watcher takes a fifth of a CPU, so it observes only when it is told to.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from statistics import median
from typing import NamedTuple

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.processes import tree_memory
from snapcap.benchmarks.harness.report import percentiles_ms
from snapcap.benchmarks.harness.workload import ROOT, environment

ON, OFF = "on\n", "off\n"
_PATIENCE_S = 300.0
MEMORY_S = 0.2
WORK_S, REST_S = 0.02, 0.4
TIMEOUT_S = 300.0
_REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Latencies:
    """Statistics of answered probes, in seconds."""

    count: int
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Latencies":
        values = sorted(seconds) or [0.0]
        return cls(len(values), percentiles_ms(values)["p99_ms"] / 1000, values[-1])


@dataclass(frozen=True)
class Window:
    """The observations between two moments.

    livez: probes of /livez.
    failed: number of probes of /livez without an answer.
    control: probes of a server that does nothing.
    stretch: how many times longer than its CPU time a little work took.
    peak: greatest memory of the server, in bytes.
    """

    livez: Latencies
    failed: int
    control: Latencies
    stretch: float
    peak: int


class Probe(NamedTuple):
    """An observation of this program."""

    kind: str
    began: float
    value: float

    def overlaps(self, began: float, ended: float) -> bool:
        """Returns whether it was under way at some time between two moments."""
        return self.began <= ended and self.began + self.value >= began


class ServerWatch:
    """Watches the server on a port during `awake`. A context manager.

    ``pid`` is the server's first process, for its memory and the stretch. ``interval`` is the seconds between two
    probes.
    """

    def __init__(self, port: int, pid: int | None = None, interval: float = 0.01) -> None:
        options = ["--port", str(port), "--interval", str(interval)]
        self._command = [sys.executable, __file__, *options]
        self._kinds = {"control"}
        if pid is not None:
            self._command += ["--pid", str(pid)]
            self._kinds |= {"memory", "stretch"}
        self._seen: list[Probe] = []
        self._latest: dict[str, float] = {}  # moment of the last observation, by kind
        self._changed = threading.Condition()

    def __enter__(self) -> "ServerWatch":
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with self.awake():
            pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Observes during the block, from the first probe on."""
        self._tell(ON)
        try:
            self.until(time.monotonic())
            yield
        finally:
            self._tell(OFF)

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def window(self, began: float, ended: float) -> Window:
        """Returns the probes that were under way between two moments of `time.monotonic`. Waits for the probes
        that still are, so it must be `awake`.

        Raises:
            TimeoutError: the watcher has stopped writing.
        """
        self.until(ended)
        probes = self.probes(began, ended)

        def of(kind: str) -> list[float]:
            return [probe.value for probe in probes if probe.kind == kind]

        memory = [int(probe.value) for probe in self._snapshot("memory") if began <= probe.began <= ended]
        livez, control = Latencies.of(of("livez")), Latencies.of(of("control"))
        # The median is used, because the worst value depends on a scheduler's slices, and would allow a stall of
        # any length.
        stretches = [probe.value for probe in self._snapshot("stretch") if probe.overlaps(began, ended)]
        stretch = median(stretches) if stretches else 1.0
        return Window(livez, len(of("failed")), control, max(stretch, 1.0), max(memory, default=0))

    def probes(self, began: float, ended: float) -> list[Probe]:
        """Returns probes of /livez and of the control that were under way between two moments, and have ended by
        now."""
        return [probe for probe in self._snapshot("livez", "control", "failed") if probe.overlaps(began, ended)]

    def until(self, moment: float) -> None:
        """Waits until each kind has been observed after a moment.

        Raises:
            TimeoutError: the watcher has stopped writing.
        """

        def is_past() -> bool:
            late = {kind for kind, at in self._latest.items() if at >= moment}
            return self._kinds <= late and bool({"livez", "failed"} & late)

        with self._changed:
            if not self._changed.wait_for(is_past, _PATIENCE_S):
                raise TimeoutError("the watcher does not tell any more")

    def _snapshot(self, *kinds: str) -> list[Probe]:
        with self._changed:
            return [probe for probe in self._seen if probe.kind in kinds]

    def _read(self) -> None:
        if self._process.stdout is None:
            return
        for line in self._process.stdout:
            kind, at, value = json.loads(line)
            with self._changed:
                self._seen.append(Probe(kind, at, value))
                self._latest[kind] = at
                self._changed.notify_all()


class Output:
    """Writes lines to standard output, each in one piece, from the event loop and from a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def tell(self, kind: str, began: float, value: float) -> None:
        line = json.dumps([kind, round(began, 6), round(value, 6)]).encode() + b"\n"
        with self._lock:
            os.write(1, line)


async def get(port: int) -> bool:
    """Returns whether /livez answers 200, on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_REQUEST)
        reply = await reader.read()
    finally:
        writer.close()
    return reply.startswith(b"HTTP/1.1 200 ")


async def probe(port: int, kind: str, interval: float, output: Output, awake: asyncio.Event) -> None:
    """Probes again and again, ``interval`` seconds apart, while it is ``awake``. A probe is one observation,
    however long it waits."""
    while await awake.wait():
        began = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answered = await get(port)
        except (OSError, TimeoutError):
            answered = False
        output.tell(kind if answered else "failed", began, time.monotonic() - began)
        await asyncio.sleep(interval)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(_REPLY)
    await writer.drain()
    writer.close()


async def control(listener: socket.socket) -> None:
    server = await asyncio.start_server(answer, sock=listener)
    await server.serve_forever()


def fork_control() -> tuple[int, int]:
    """Forks a server that does nothing. Returns its process id and port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    child = os.fork()
    if child == 0:
        asyncio.run(control(listener))
    listener.close()
    return child, port


def fork_work(output: Output, awake: Event) -> int:
    """Forks a process that works a little now and then while it is ``awake``. Returns its process id."""
    child = os.fork()
    if child:
        return child
    while True:
        awake.wait()
        began, worked = time.monotonic(), time.process_time()
        while time.process_time() - worked < WORK_S:
            pass
        output.tell("stretch", began, (time.monotonic() - began) / WORK_S)
        time.sleep(REST_S)


def sample_memory(pid: int, output: Output, awake: Event) -> None:
    while True:
        awake.wait()
        output.tell("memory", time.monotonic(), tree_memory(pid))
        time.sleep(MEMORY_S)


async def watch(port: int, control_port: int, interval: float, output: Output, awake: Event) -> None:
    """``awake`` is for other processes and threads, which it wakes as it does the probes."""
    ports, probing = {"livez": port, "control": control_port}, asyncio.Event()
    tasks = [asyncio.create_task(probe(each, kind, interval, output, probing)) for kind, each in ports.items()]
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        for each in (awake, probing):
            (each.set if line == ON else each.clear)()
    for task in tasks:
        task.cancel()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--pid", type=int, help="process id of the server's first process; without it only probes are written"
    )
    parser.add_argument("--interval", type=float, default=0.01, help="seconds between two probes")
    options = parser.parse_args()
    output, awake = Output(), multiprocessing.get_context("fork").Event()
    child, control_port = fork_control()
    children = [child, *([] if options.pid is None else [fork_work(output, awake)])]
    try:
        if options.pid is not None:
            threading.Thread(target=sample_memory, args=(options.pid, output, awake), daemon=True).start()
        asyncio.run(watch(options.port, control_port, options.interval, output, awake))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
