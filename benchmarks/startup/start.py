"""Measures one start of one case, from spawn to its first caption: its time, phases and memory."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from snapcap.benchmarks.harness.marks import read_marks, read_result
from snapcap.benchmarks.harness.processes import (
    DeviceMemory,
    Watch,
    children,
    descendants,
    device_memory,
    is_compiler,
    kernel_counts_children,
    own_parts,
    peak_host_bytes,
)
from snapcap.benchmarks.harness.server import (
    SNAPCAP_API,
    START_LIMIT_S,
    Connection,
    Endpoint,
    Server,
    run_measured,
    serving,
)
from snapcap.benchmarks.harness.workload import Workload
from snapcap.benchmarks.report.charts import CAPTION, HTTP, Segment, from_marks, from_startup, seconds_by_name

STEADY_CAPTIONS = 20
STEADY_LIMIT_S = 5.0
SERVING_COMPILES = 'snapcap_compile_events_total{when="serving"}'


@dataclass
class Start:
    """The measurements of a start.

    total: seconds since the spawn, to which the segments sum.
    values: all numbers that are quoted as a median over the runs.
    facts: other observations.
    """

    total: float
    segments: list[Segment]
    values: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def measured(self) -> dict[str, float]:
        """Returns all numbers by name. Phases are named ``phase NAME``."""
        phases = {f"phase {name}": seconds for name, seconds in seconds_by_name(self.segments).items()}
        return {"total": self.total, **self.values, **phases}


@dataclass(frozen=True)
class Machine:
    """Facts about the machine that are found out once: whether its kernel counts children, and whether it has a
    GPU."""

    counts_children: bool
    gpu: bool

    @classmethod
    def look(cls, device: str) -> "Machine":
        return cls(kernel_counts_children(), device == "cuda")

    def memory(self) -> DeviceMemory | None:
        return device_memory() if self.gpu else None


def start_script(command: Sequence[str], machine: Machine, extra: Mapping[str, str], last: str) -> Start:
    """Runs a child that marks its own start and ends. Its last mark is the total."""
    before = machine.memory()
    spawned, lines = run_measured(command, START_LIMIT_S, extra)
    marks, result = read_marks(lines), read_result(lines)
    if not marks or marks[-1][1] != last:
        raise RuntimeError(f"the child did not come to {last!r}: {lines[-1:]}")
    total = marks[-1][0] - spawned
    numbers = {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
    if before is not None and "device_used_mib" in numbers:
        numbers["device_mib"] = numbers["device_used_mib"] - before.used / (1 << 20)
    return Start(total, from_marks(marks, spawned, total, last), numbers)


@dataclass(frozen=True)
class ServerStart:
    """The way to start and ask a server."""

    command: tuple[str, ...]
    workload: Workload
    machine: Machine
    environment: Mapping[str, str]
    api: Endpoint = SNAPCAP_API
    # Looks at the process table all the time, which costs CPU time. Such times must not be quoted.
    watched: bool = False
    check: Callable[[Mapping[str, Any]], None] = lambda _startup: None
    afterwards: Callable[[Server], dict[str, Any]] = lambda _server: {}

    def run(self) -> Start:
        before = self.machine.memory()
        with ExitStack() as stack:
            server = stack.enter_context(serving(self.command, self.api, self.environment))
            watch = stack.enter_context(Watch(server.pid)) if self.watched else None
            try:
                start = self._first_captions(server)
            except OSError as error:
                server.check()  # raises with the server's exit, if it has ended
                raise RuntimeError(f"{error}: {server.last_line()}") from error
            # The kernel counts children, so a child that has ended is known without having been seen.
            parts = own_parts(server.pid) if self.api is SNAPCAP_API else []
            started = children(server.pid, self.machine.counts_children, parts)
            self._memory(server, parts, start, before)
            start.facts["children"] = {"ended": started.ended, "alive": list(started.alive), "none": started.none}
            if watch is not None:
                start.facts |= {"programs": watch.programs, "watched_every_ms": watch.interval * 1000}
            programs = watch.programs if watch is not None else started.alive
            start.facts["compilers"] = sorted(filter(is_compiler, programs))
            start.facts.update(self.afterwards(server))
            return start

    def _first_captions(self, server: Server) -> Start:
        image, _ = self.workload.first_image
        values: dict[str, float] = {}
        connection = server.connect()
        snapcap = self.api is SNAPCAP_API
        if snapcap:
            connection.request("/livez")
            values["live"] = server.seconds()
        server.wait_ready(connection)
        values["ready"] = server.seconds()
        reply = server.caption(connection, image)
        total = values["first_caption"] = server.seconds()
        self.workload.check(reply.json())
        startup = connection.request("/startup").json() if snapcap else {}
        steady = steady_caption(server, connection, image)
        values["first_to_steady"] = (total - values["ready"]) / steady
        values["steady_ms"] = steady * 1000
        if snapcap:
            self.check(startup)
            values["compiles_serving"] = server.metrics().get(SERVING_COMPILES, 0.0)
            segments = from_startup(startup, total)
            facts = {"startup": without_places(startup)}
            for imported in (phase["end"] for phase in startup["phases"] if phase["name"] == "import_torch"):
                values["live_before_torch"] = imported - startup["marks"]["live"]
        else:
            marks = read_marks(server.log().splitlines())
            segments = from_marks(
                [*marks, (server.spawned + values["ready"], HTTP)], server.spawned, total, CAPTION
            )
            facts = {}
        connection.close()
        return Start(total, segments, values, facts)

    def _memory(self, server: Server, parts: list[int], start: Start, before: DeviceMemory | None) -> None:
        """Adds the memory of the server and its own processes. A peer's workers count, a build's compilers do
        not."""
        pids = [server.pid, *parts]
        if self.api is not SNAPCAP_API:
            pids += [pid for pid, _ in descendants(server.pid)]
        peaks, after = [peak_host_bytes(pid) for pid in pids], self.machine.memory()
        if peaks[0] is not None:
            start.values["peak_host_mib"] = sum(peak for peak in peaks if peak is not None) / (1 << 20)
        if before is not None and after is not None:
            start.values["device_mib"] = after.held_by(pids, before) / (1 << 20)


def without_places(startup: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `/startup` that are kept. They name no folder or host of the measured machine."""
    kept = ("marks", "phases", "backend", "tier", "device", "dtype", "torch_modules", "buckets")
    artifacts = startup["artifacts"] or {}
    found = {name: artifacts.get(name) for name in ("kind", "result", "seconds", "bytes_fetched")}
    weights = startup["weights"] or {}
    prepared = {name: weights.get(name) for name in ("result", "bytes_fetched")}
    return {**{name: startup[name] for name in kept}, "artifacts": found, "weights": prepared}


def steady_caption(server: Server, connection: Connection, image: bytes) -> float:
    """Returns the seconds of a lone caption once the server is warm: the median of several, one after the other."""
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < STEADY_CAPTIONS and sum(seconds) < STEADY_LIMIT_S):
        began = time.monotonic()
        server.caption(connection, image)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


def expect(backend: str, later: bool = False) -> Callable[[Mapping[str, Any]], None]:
    """Returns a check that a start serves ``backend`` in every bucket. With ``later``, buckets may be warmed after
    READY."""
    expected = {"warm", "eager", "captured"} | ({"pending"} if later else set())

    def check(startup: Mapping[str, Any]) -> None:
        backends = {bucket["backend"] for bucket in startup["buckets"]}
        states = {bucket["state"] for bucket in startup["buckets"]}
        if startup["tier"] != backend or backends != {backend} or not states <= expected:
            raise RuntimeError(f"expected {backend} in every bucket: {startup['buckets']}")

    return check
